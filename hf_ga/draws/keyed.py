"""Keyed draws: while a micro-batch is processed, all random numbers of torch belong to samples."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, update_wrapper
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Generator, Tensor
from torch._C._functorch import TransformType
from torch._guards import CompileContext
from torch.nn import Module, Parameter
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakTensorKeyDictionary

from hf_ga.draws.draw import Draw, cached_key
from hf_ga.draws.dropout.dropout_functions import dropped_attention
from hf_ga.draws.dropout.dropout_site import DropoutSite
from hf_ga.draws.dropout.masks import apply_dropout_mask, drop
from hf_ga.draws.hashing import fold_in_each
from hf_ga.draws.refusal import NotKeyed, user_code
from hf_ga.draws.replacements import REPLACEMENTS, Replacement
from hf_ga.draws.sample_dims import SampleDims
from hf_ga.errors import UnkeyedRandomness
from hf_ga.model.override import replaced

REMEDY_OF_OTHERS = (
    "Draw in every micro-batch, and use the numbers for some samples only (torch.where, or a "
    "product with a mask)."
)
REMEDY_IN_BACKWARD = (
    "Use checkpoint(..., preserve_rng_state=True), and do not draw noise in hooks of a backward; "
    "or use Accelerator(allow_split_dependent_randomness=True)."
)


@dataclass
class MicroBatch:
    """Where the draws of a micro-batch stand.

    Attributes:
        keys: One random key per sample: int64, shape (samples,).
        window_key: The key of numbers that all samples of the window share: int64, shape (1,).
        num_draws: How many draws were made since the micro-batch began, or since `seed` was set.
        seed: The last seed that `torch.manual_seed` has set in the micro-batch.
        num_seedings: How often it was called.
        is_recomputation: Whether activation checkpointing repeats draws of the forward.
        moved: Copies of `keys` and `window_key` on other devices.
    """

    keys: Tensor
    window_key: Tensor
    num_draws: int = 0
    seed: int | None = None
    num_seedings: int = 0
    is_recomputation: bool = False
    moved: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        """What identifies the next draw in every micro-batch."""
        return self.place_of(self.num_draws)

    def place_of(self, number: int) -> tuple[int, int]:
        """Return what identifies a draw in every micro-batch."""
        return self.num_seedings, number

    def keys_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the keys of the samples and of the window on a device."""
        if device == self.keys.device:
            return self.keys, self.window_key
        if device not in self.moved:
            self.moved[device] = (self.keys.to(device), self.window_key.to(device))
        return self.moved[device]


@dataclass(frozen=True)
class KnownDraws:
    """What keyed draws know from the micro-batches so far, for other processes.

    Attributes:
        sites: See `KeyedDraws.sites`, with keys on the CPU.
        sample_dims: The possible layouts of each draw.
    """

    sites: dict[tuple[int, int], Draw]
    sample_dims: SampleDims


class KeyedDraws:
    """Replaces torch's random functions by functions that derive each number from (key of its
    sample, number of the draw in the micro-batch, coordinates within the sample's rows).

    So the numbers depend neither on how a window is split into micro-batches, nor on the padded
    width. Numbers that all samples share (`torch.rand(1)`) are derived from the key of the window.
    The global generators and the user's generators stay as they are.

    Attributes:
        allow_unkeyed: Whether draws that cannot be tied to samples are torch's own. Otherwise they
            are refused.
        attend: Computes attention with a given dropout mask of its weights: `dropped_attention`, or
            a faster function that a speed-up puts in its place.
        mask_source: A speed-up that draws some of the dropout masks itself, see
            `speed.packing.Packing.masks_of_shape`. None: there is none.
        weight_shapes: Shapes of the trained parameters. After a backward, draws of these shapes are
            noise on gradients or weights, and not of samples, whose number may be such a size.
        models: The models that are trained. After a backward, draws while all of them are in
            evaluation mode are torch's own.
        first_draw: The number of a micro-batch's first draw. Not 0 only in a stage of a pipeline,
            because the stages before it make the draws before it.
        places: Random function that was called -> where the user's code called it first.
        sites: For each dropout mask of padded samples, its last draw, by its place.
        has_unkeyed: Whether a draw of the micro-batch was torch's own, as `allow_unkeyed` permits.
        taken_for_weights: A draw of the micro-batch that was taken for noise on a weight, but has a
            dim that may hold the samples; None if there was none.
        unkeyed_after_backward: Description of the first draw after `after_backward` that could not
            be tied to samples; None if there was none.

    Example:
        draws = KeyedDraws()
        with draws.scope():
            draws.begin(sample_keys(seed, epoch, positions), window_key(seed, epoch, index))
            noise = torch.randn_like(images)
            loss = model(images + noise)
    """

    def __init__(self, allow_unkeyed: bool = False) -> None:
        """Create keyed draws without keys: until `begin`, all draws are torch's own."""
        self.allow_unkeyed = allow_unkeyed
        self.attend: Callable[..., Tensor] = dropped_attention
        self.mask_source: Any = None
        self.weight_shapes: frozenset[torch.Size] = frozenset()
        self.models: Sequence[Module] = ()
        self.first_draw = 0
        self.places: dict[str, str] = {}
        self.sites: dict[tuple[int, int], Draw] = {}
        self.has_unkeyed = False
        self.taken_for_weights: str | None = None
        self.unkeyed_after_backward: str | None = None
        self._is_after_backward = False
        self._micro_batch: MicroBatch | None = None
        self._sample_dims = SampleDims()
        # Function and number of dims of each draw of the window, by its place.
        self._kinds: dict[tuple[int, int], tuple[str, int]] = {}
        self._num_scopes = 0
        self._num_suspensions = 0
        self._thread = threading.get_ident()
        # Where the draws stood when a state of torch's generator was saved.
        self._saved = WeakTensorKeyDictionary()

    def begin(self, keys: Tensor, window_key: Tensor, device: torch.device | None = None) -> None:
        """Begin a micro-batch: the next draw has the number `first_draw`.

        Args:
            keys: One random key per sample: int64, shape (samples,).
            window_key: The key of numbers that all samples of the window share: int64, shape (1,).
            device: Where most numbers are needed. None: that of the keys.
        """
        # On the host, a GPU runs no kernels for it.
        unmixed = torch.cat([keys, window_key]).cpu().numpy().view(np.uint64)
        mixed = torch.from_numpy(fold_in_each(0, unmixed).view(np.int64))
        mixed = mixed.to(device or keys.device, non_blocking=True)
        self._micro_batch = MicroBatch(mixed[:-1], mixed[-1:], self.first_draw)
        self.mask_source = None
        self._is_after_backward = False
        self.has_unkeyed = False
        self.taken_for_weights = None
        self.unkeyed_after_backward = None

    def after_backward(self) -> None:
        """Until the next `begin`, do not refuse draws that cannot be tied to samples, such as those
        of a validation: they are torch's own, and `unkeyed_after_backward` describes the first.
        """
        self._is_after_backward = True

    def known(self) -> KnownDraws:
        """Return what is known from the micro-batches so far."""
        sites = {place: replace(draw, keys=draw.keys.cpu()) for place, draw in self.sites.items()}
        return KnownDraws(sites, deepcopy(self._sample_dims))

    def adopt(self, known: KnownDraws) -> None:
        """Know what the draws of another process know, of the same model."""
        self.sites = dict(known.sites)
        self._sample_dims = deepcopy(known.sample_dims)

    def begin_window(self) -> None:
        """Begin a window, whose micro-batches all make the same draws."""
        self._kinds = {}

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """At the end of the block, let the draws stand where they stood before it, so that the next
        forward repeats the numbers of one in the block.
        """
        micro_batch = replace(self._micro_batch)
        sample_dims = deepcopy(self._sample_dims)
        try:
            yield
        finally:
            self._micro_batch = micro_batch
            self._sample_dims = sample_dims
            self.mask_source = None

    def mark(self) -> MicroBatch:
        """Return where the draws stand, for `replayed`."""
        return replace(self._micro_batch)

    @contextmanager
    def replayed(self, mark: MicroBatch) -> Iterator[None]:
        """Draw the numbers since a mark once more in the block."""
        with self.rewound():
            self._micro_batch = replace(mark)
            yield

    @property
    def keys(self) -> Tensor:
        """The keys of the samples from which draws of this micro-batch are derived."""
        return self._micro_batch.keys

    @property
    def num_draws(self) -> int:
        """How many draws the micro-batch has made so far, or since `torch.manual_seed`."""
        return 0 if self._micro_batch is None else self._micro_batch.num_draws

    @property
    def num_samples(self) -> int:
        """How many samples the micro-batch has."""
        return len(self._micro_batch.keys)

    @property
    def num_reclassified(self) -> int:
        """How often a micro-batch contradicted the dim in which earlier ones had the samples of a
        draw, so that the numbers of the earlier ones were keyed otherwise.
        """
        return self._sample_dims.num_reclassified

    def doubtful_shape(self) -> tuple[int, ...] | None:
        """Return the shape of a draw of which the micro-batches so far, all of one size, do not
        tell which dim has the samples; None if there is none.
        """
        return self._sample_dims.doubtful_shape()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within the block, torch's random functions draw keyed numbers, in this thread and in
        every backward. At the end, they are torch's own again. Blocks may be nested.
        """
        with ExitStack() as stack:
            if self._num_scopes == 0:
                self._thread = threading.get_ident()
                _device_constructors()  # torch lists its functions in the first call: not ours
                is_compiling = "torch._dynamo" in sys.modules  # which takes a second to import
                replacements = self._untraced if is_compiling else self._replacements
                stack.enter_context(replaced(replacements))
            self._num_scopes += 1
            try:
                yield
            finally:
                self._num_scopes -= 1

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within the block, torch's random functions draw torch's own numbers, also in a scope."""
        self._num_suspensions += 1
        try:
            yield
        finally:
            self._num_suspensions -= 1

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Within the block, draws are keyed again, also within `suspended`."""
        num_suspensions = self._num_suspensions
        self._num_suspensions = 0
        try:
            yield
        finally:
            self._num_suspensions = num_suspensions

    def draw(
        self,
        function: str,
        shape: torch.Size,
        device: torch.device,
        generator: Generator | None = None,
        batch_dims: int | None = None,
        only_shared: bool = False,
    ) -> Draw:
        """Return the next draw of the micro-batch.

        Args:
            function: Name of the random function.
            shape: Shape of the numbers.
            device: Where they are needed.
            generator: The generator that the user passed: its seed makes the numbers others.
            batch_dims: How many leading dims may hold the samples. None: all.
            only_shared: Whether all samples share the numbers, whatever their shape.

        Raises:
            NotKeyed: If the numbers cannot be tied to samples.
        """
        micro_batch = self._micro_batch
        number = micro_batch.num_draws
        micro_batch.num_draws += 1
        if is_in_backward() and not micro_batch.is_recomputation:
            reason = "it is drawn in a backward, and does not repeat a draw of the forward"
            raise NotKeyed(function, shape, reason, REMEDY_IN_BACKWARD)
        if self._is_after_backward and self._is_in_evaluation(generator):
            reason = (
                "it is drawn without gradients after a backward, as in an evaluation: draw what is "
                "of samples before that backward"
            )
            raise NotKeyed(function, shape, reason)
        if is_in_vmap():
            raise NotKeyed(function, shape, "it is drawn in a function that torch.vmap transforms")
        kind = (function, len(shape))
        known = self._kinds.setdefault(micro_batch.place_of(number), kind)
        if kind != known:
            reason = (
                f"it is draw {number + 1} of this micro-batch, which is {known[0]} in another one "
                "of the window, so the draws depend on which samples a micro-batch has"
            )
            raise NotKeyed(function, shape, reason, REMEDY_OF_OTHERS)
        if not all(isinstance(size, int) for size in shape):
            raise NotKeyed(function, shape, "the samples of a nested tensor differ in size")
        if self.mask_source is not None and self.mask_source.is_refused(shape):
            raise NotKeyed(function, shape, "its rows are tokens of several samples, packed")
        place = (*micro_batch.place_of(number), function)
        is_of_weights = self._is_after_backward and shape in self.weight_shapes
        if is_of_weights and any(size % self.num_samples == 0 for size in shape):
            self.taken_for_weights = f"{function} of shape {list(shape)}"
        sample_dim = self._sample_dim(place, shape[:batch_dims], only_shared or is_of_weights)
        if function not in self.places:
            self.places[function] = user_code()
        is_shared = sample_dim is None
        if is_shared and self._is_after_backward and generator is not None:
            raise NotKeyed(function, shape, "it has no dim with the samples of the micro-batch")
        site = self.site_key(number, generator)
        keys, window_key = micro_batch.keys_on(device)
        return Draw(window_key if is_shared else keys, site, torch.Size(shape), sample_dim)

    def _is_in_evaluation(self, generator: Generator | None) -> bool:
        """Whether the running code evaluates: without gradients, and with models in evaluation mode
        or from a generator of the user's, as for images that are compared over the run.
        """
        if torch.is_grad_enabled():
            return False
        return generator is not None or not any(model.training for model in self.models)

    def site_key(self, number: int, generator: Generator | None = None) -> int:
        """Return the 64-bit key of a draw."""
        seeds = [self._micro_batch.seed, None if generator is None else generator.initial_seed()]
        return cached_key(number, *[seed for seed in seeds if seed is not None])

    def _sample_dim(
        self, place: tuple[int, int, str], shape: torch.Size, only_shared: bool
    ) -> int | None:
        """Return the dim of a draw that holds the samples; None if they share the numbers."""
        if 0 in shape:
            return None
        num_samples = self.num_samples
        layout = self._sample_dims.find((*place, len(shape)), shape, num_samples, only_shared)
        if layout is None:
            reason = (
                "its shape changes between micro-batches, but does not hold an equal number of "
                f"rows for each of the {num_samples} samples"
            )
            raise NotKeyed(place[-1], shape, reason)
        return layout.dim

    # Dropout.

    def needs_mask(self, drop_probability: float, training: bool = True) -> bool:
        """Whether a call of a dropout function draws a mask. Otherwise it is left to torch."""
        return training and 0 < drop_probability < 1

    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw a dropout mask on the device of the keys: bool, True where dropout keeps."""
        packed = self._packed_masks(shape)
        if packed is not None:
            return packed.mask(self._count_site(), shape, drop_probability)
        draw = self._draw_dropout(shape, self._micro_batch.keys.device)
        return draw.keep_mask(drop_probability)

    def drop(self, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to a tensor, elementwise, with one fused kernel where there is one."""
        packed = self._packed_masks(input.shape)
        if packed is not None:
            return packed.drop(self._count_site(), input, drop_probability)
        is_of_weights = isinstance(input, Parameter)
        draw = self._draw_dropout(input.shape, input.device, is_of_weights=is_of_weights)
        dropped = drop(input, draw.keys, draw.site, draw.sample_dim, drop_probability)
        if dropped is not None:
            return dropped
        return apply_dropout_mask(input, drop_probability, draw.keep_mask(drop_probability))

    def _draw_dropout(
        self, shape: torch.Size, device: torch.device, *, is_of_weights: bool = False
    ) -> Draw:
        """Return the draw of a dropout mask of padded samples, or of a layer's weights."""
        place = self._micro_batch.place
        draw = self.draw("dropout", shape, device, only_shared=is_of_weights)
        self.sites[place] = draw
        return draw

    # The interface of speed-ups that draw dropout masks themselves.

    def next_site(self) -> DropoutSite | None:
        """Return where the next draw takes place, without counting it, if an earlier micro-batch
        has drawn a dropout mask of padded samples there; otherwise None.
        """
        micro_batch = self._micro_batch
        known = self.sites.get(micro_batch.place)
        if known is None:
            return None
        dim = known.sample_dim
        if dim is not None and known.rows_per_sample != 1:
            dim = None
        return DropoutSite(
            name=f"draw {micro_batch.num_draws} of the micro-batch",
            key=self.site_key(micro_batch.num_draws),
            shape=known.shape,
            sample_dim=dim,
        )

    def skip_draw(self) -> None:
        """Count a draw without making it: a kernel of a speed-up makes it."""
        self._micro_batch.num_draws += 1

    def _packed_masks(self, shape: torch.Size) -> Any:
        """Return what draws the masks of packed tokens, if a mask of this shape is one."""
        return None if self.mask_source is None else self.mask_source.masks_of_shape(shape)

    def _count_site(self) -> DropoutSite:
        """Return where the next draw takes place, and count it. UnkeyedRandomness if no earlier
        micro-batch has drawn a dropout mask there.
        """
        site = self.next_site()
        if site is None:
            raise UnkeyedRandomness(
                f"draw {self.num_draws} of a micro-batch is a dropout mask of packed tokens, but "
                "no micro-batch before had one: the model's path depends on its data."
            )
        self.skip_draw()
        return site

    # The replacements.

    @cached_property
    def _replacements(self) -> list[Replacement]:
        """The functions that take the places of torch's: the same ones in every scope, because
        torch.compile knows functions by their identity.
        """
        return [
            (owner, name, self._replacement(getattr(owner, name), keyed))
            for owner, name, keyed in [*REPLACEMENTS, *OF_GENERATOR]
        ]

    @cached_property
    def _untraced(self) -> list[Replacement]:
        """The replacements as torch.compile may call them: each draw breaks the graph, which would
        otherwise keep the keys and the number of the draw that it was traced with.
        """
        return [
            (owner, name, _untraced_draws(getattr(owner, name), replacement))
            for owner, name, replacement in self._replacements
        ]

    @property
    def _is_keying(self) -> bool:
        """Whether draws of the running code are keyed."""
        if self._num_scopes == 0 or self._num_suspensions > 0 or self._micro_batch is None:
            return False
        if is_compiling():
            return False
        # Another thread may load data.
        return threading.get_ident() == self._thread or is_in_backward()

    def _replacement(self, original: Callable, keyed: Callable) -> Callable:
        """Return the function that takes the place of a random function of torch. It refers to this
        object weakly, because torch.compile, and modules imported in a scope, never free it.
        """
        weak_self = ref(self)

        def replacement(*args: object, **kwargs: object) -> object:
            """Call the keyed function, or the original where numbers are torch's own."""
            draws = weak_self()
            if draws is None or not draws._is_keying:
                return original(*args, **kwargs)
            try:
                return keyed(draws, original, *args, **kwargs)
            except NotKeyed as error:
                draws._refuse(error)
            with draws.suspended():
                return original(*args, **kwargs)

        return update_wrapper(replacement, original)

    def _refuse(self, error: NotKeyed) -> None:
        """Raise an error for a draw, unless unkeyed draws are allowed now."""
        if self._is_after_backward:
            self.unkeyed_after_backward = self.unkeyed_after_backward or error.description
        elif not self.allow_unkeyed:
            raise UnkeyedRandomness(str(error)) from None
        else:
            self.has_unkeyed = True


def _untraced_draws(original: Callable, replacement: Callable) -> Callable:
    """Return a replacement that breaks a graph of torch.compile only where it draws: a dropout of 0
    or of an evaluation is traced as torch's own.
    """
    untraced = torch.compiler.disable(replacement)
    if original.__name__ == "scaled_dot_product_attention":

        def attention(*args: object, **kwargs: object) -> object:
            """Trace attention without dropout."""
            rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            return untraced(*args, **kwargs) if rate else original(*args, **kwargs)

        return update_wrapper(attention, original)
    if original.__name__ == "dropout":

        def dropout(*args: object, **kwargs: object) -> object:
            """Trace dropout with a rate of 0, and that of an evaluation."""
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_training = kwargs.get("training", args[2] if len(args) > 2 else True)
            draws = rate and is_training
            return untraced(*args, **kwargs) if draws else original(*args, **kwargs)

        return update_wrapper(dropout, original)
    return untraced


# The state of torch's generator includes where the draws stand. Activation checkpointing saves it
# before a forward, and restores it before it recomputes the forward in the backward.


def save_state(draws: KeyedDraws, original: Callable) -> Tensor:
    """Replacement of `torch.get_rng_state`: remembers where the draws stand."""
    state = original()
    micro_batch = draws._micro_batch
    is_in_forward = not is_in_backward() or micro_batch.is_recomputation
    draws._saved[state] = replace(micro_batch, is_recomputation=is_in_forward)
    return state


def restore_state(draws: KeyedDraws, original: Callable, new_state: Tensor) -> None:
    """Replacement of `torch.set_rng_state`: makes the draws stand where they stood then."""
    original(new_state)
    saved = draws._saved.get(new_state)
    if saved is None:
        return
    # In a backward, the draws of an earlier micro-batch may be repeated; elsewhere, the user sets
    # an old state.
    if is_in_backward() or saved.keys is draws._micro_batch.keys:
        is_recomputation = saved.is_recomputation and is_in_backward()
        draws._micro_batch = replace(saved, is_recomputation=is_recomputation)


def set_seed(draws: KeyedDraws, original: Callable, seed: int) -> Generator:
    """Replacement of `torch.manual_seed`: the same seed repeats the same draws in a micro-batch."""
    micro_batch = draws._micro_batch
    generator = original(seed)
    micro_batch.seed = generator.initial_seed()
    micro_batch.num_seedings += 1
    micro_batch.num_draws = 0
    return generator


OF_GENERATOR = [
    (owner, name, keyed)
    for owner in (torch, torch.random)
    for name, keyed in [
        ("get_rng_state", save_state),
        ("set_rng_state", restore_state),
        ("manual_seed", set_seed),
    ]
]


def is_in_backward() -> bool:
    """Whether autograd's backward is running."""
    return torch._C._current_graph_task_id() != -1


def is_compiling() -> bool:
    """Whether torch.compile is compiling, for which it draws numbers of its own and traces patterns
    with dropout.
    """
    return CompileContext.try_get() is not None


def is_in_vmap() -> bool:
    """Whether the running function is transformed by `torch.vmap`, which hides dims of a draw."""
    transforms = torch._C._functorch.get_interpreter_stack() or []
    return any(transform.key() == TransformType.Vmap for transform in transforms)
