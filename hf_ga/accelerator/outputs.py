"""What a model's forwards returned during one micro-batch of a user's loop."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.accelerator.criteria import CriteriaWatch
from hf_ga.errors import ConfigError, HfGaError
from hf_ga.exact.forward import get_output, unwrapped
from hf_ga.exact.outputs import named_tensors
from hf_ga.speed.lazy_logits import LazyLogits

# Where outputs keep (logits, hidden states that they were computed from).
COMPUTED_FROM = "_hf_ga_computed_from"


# Arguments that change neither the loss nor what it averages over.
HARMLESS = ("return_dict", "output_hidden_states", "output_attentions", "use_cache")
# A loop may leave these out and compute its own loss.
LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


class ForwardWatch:
    """Watches the training forwards of a prepared model.

    Args:
        model: The prepared model.
        is_open: Whether a micro-batch was handed out and its backward is still to come.
        criteria: Notes the loss functions that the loop calls outside of the model.
        give_up: Called before an error of a forward: leaves the micro-batch.
        notes_tensors: Note the tensors in the outputs, to see whether the loop changes them.

    Attributes:
        outputs: What the last watched forward returned. None: there was none in this micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        is_open: Callable[[], bool],
        criteria: CriteriaWatch,
        give_up: Callable[[], None],
        *,
        notes_tensors: bool = False,
    ) -> None:
        self.model = model
        self.is_open = is_open
        self.criteria = criteria
        self.give_up = give_up
        self._notes_tensors = notes_tensors
        self._noted: dict[str, tuple[Tensor, int]] = {}
        self._given: tuple[tuple, dict[str, Any]] = (), {}
        self.outputs: Any = None
        # Called once with the arguments of the next training forward, before it runs.
        self.prove: Callable[[tuple, dict[str, Any]], None] | None = None
        # Called with them where the forward gets something else than the batch.
        self.prove_again: Callable[[tuple, dict[str, Any]], None] | None = None
        self._batch: dict[str, tuple[Any, int]] | None = None
        self._is_proving = False
        base = unwrapped(model)
        self._handles = [
            base.register_forward_pre_hook(self._before, with_kwargs=True),
            base.register_forward_hook(self._after),
        ]
        if base is not model:
            # A wrapper may return other tensors than the model that it wraps.
            self._handles.append(model.register_forward_hook(self._note))

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    @property
    def arguments(self) -> dict[str, Any]:
        """The named arguments of the last watched forward."""
        return named_arguments(unwrapped(self.model), *self._given)

    @property
    def num_samples(self) -> int:
        """Rows of the first tensor among the arguments of the last watched forward."""
        tensors = (v for v in self.arguments.values() if isinstance(v, Tensor) and v.dim())
        return len(next(tensors))

    def start(self, batch: dict[str, Any] | None = None) -> None:
        """Forget the outputs of the last micro-batch.

        Args:
            batch: The arguments that the forward should get, on the device. None: any.
        """
        self.outputs = None
        self._batch = None
        if batch is not None:
            self._batch = {name: (value, _version(value)) for name, value in batch.items()}

    def _gets_the_batch(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a forward gets the entries of the batch as they were handed out."""
        if self._batch is None:
            return True
        named = {
            name: value
            for name, value in named_arguments(unwrapped(self.model), args, kwargs).items()
            if name not in HARMLESS and value is not None
        }
        expected = {name: value for name, (value, _) in self._batch.items() if value is not None}
        without_labels = {name for name in expected if name not in LABELS}
        if named.keys() not in (expected.keys(), without_labels):
            return False
        return all(
            value is self._batch[name][0] and _version(value) == self._batch[name][1]
            for name, value in named.items()
        )

    def _is_watched(self, model: nn.Module) -> bool:
        is_training = model.training and torch.is_grad_enabled()
        return is_training and self.is_open() and not self._is_proving

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before each forward of the model."""
        if not self._is_watched(model):
            return
        try:
            self._begin(model, args, kwargs)
        except HfGaError:
            self.give_up()
            raise

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin the forward of a micro-batch; prove the model on its arguments if that is due.

        Raises:
            ConfigError: If the model runs twice on one batch, or the loop normalises the loss.
        """
        if kwargs.get("num_items_in_batch") is not None:
            raise ConfigError(
                "num_items_in_batch: the loop normalises its loss by a count of its own, but "
                "accelerator.backward already divides by the targets of the whole window: leave "
                "num_items_in_batch out and pass the model's plain loss."
            )
        if self.outputs is not None:
            raise ConfigError(
                "the model ran twice on one batch in training mode, and both runs would draw the "
                "same dropout: compute the loss from one forward, or call model.eval() or "
                "torch.no_grad() around the other one."
            )
        self._given = args, kwargs
        self.criteria.turn_off()
        prove = self.prove
        if prove is None and not self._gets_the_batch(args, kwargs):
            prove = self.prove_again
        if prove is not None:
            self.prove = None
            self._is_proving = True
            try:
                prove(args, kwargs)
            finally:
                self._is_proving = False
            self.criteria.turn_off()  # the forward goes on

    def _after(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Called after each forward of the model: keep what it returned."""
        if not self.is_open() or self._is_proving:
            return None
        output = readable(output)
        if self._is_watched(model):
            self._keep(output)
            self.criteria.turn_on()
        return output

    def _note(self, model: nn.Module, args: tuple, output: Any) -> None:
        if self._is_watched(model):
            self._keep(output)

    def _keep(self, outputs: Any) -> None:
        self.outputs = outputs
        if self._notes_tensors:
            tensors = named_tensors(outputs)
            self._noted = {name: (tensor, tensor._version) for name, tensor in tensors.items()}

    def returned(self, outputs: Any) -> bool:
        """Whether outputs are what the last watched forward returned, with unchanged tensors."""
        if outputs is not self.outputs:
            return False
        tensors = named_tensors(outputs)
        return tensors.keys() == self._noted.keys() and all(
            tensor is self._noted[name][0] and tensor._version == self._noted[name][1]
            for name, tensor in tensors.items()
        )


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss of a model's own head; None if there is none.

    It is `outputs.loss`, a tuple's first entry if that is one number, or a scalar itself.
    """
    if isinstance(outputs, _ComputedWhenRead):
        loss = dict.get(outputs, "loss")
    else:
        first = outputs[0] if type(outputs) is tuple and outputs else outputs
        loss = first if isinstance(first, Tensor) else get_output(first, "loss")
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    return None


def tensors_of(outputs: Any, *, with_gradient: bool = True) -> list[Tensor]:
    """Return all tensors in a model's outputs with a gradient, except its loss.

    Logits that are not computed yet are replaced by what they will be computed from.

    Args:
        outputs: What a model returned.
        with_gradient: False for all floating-point tensors.
    """
    loss = loss_of(outputs)
    found: list[Tensor] = []
    if isinstance(outputs, _ComputedWhenRead):
        _collect(list(dict.values(outputs)), found)
    else:
        _collect(outputs, found)
    computed_from = getattr(outputs, "__dict__", {}).get(COMPUTED_FROM, [])
    for made, hidden in computed_from:
        found = [hidden if tensor is made else tensor for tensor in found]
    if not with_gradient:
        return [tensor for tensor in found if tensor.is_floating_point()]
    return [tensor for tensor in found if tensor is not loss and tensor.requires_grad]


def _collect(value: Any, found: list[Tensor]) -> None:
    """Add all tensors in a model's outputs to a list."""
    if isinstance(value, LazyLogits):
        found.append(value.hidden)
    elif isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for entry in value.values():
            _collect(entry, found)
    elif isinstance(value, list | tuple):
        for entry in value:
            _collect(entry, found)


def readable(outputs: Any) -> Any:
    """Let the logits in outputs be computed when somebody reads them; then they are plain tensors.

    Args:
        outputs: What a model returned. A `ModelOutput` with lazy logits becomes one whose class
            changes back when anything but its loss is read. Of another mapping or a tuple the
            lazy logits are computed at once.
    """
    if isinstance(outputs, LazyLogits):
        return outputs.values()
    if isinstance(outputs, tuple) and any(isinstance(v, LazyLogits) for v in outputs):
        return type(outputs)(readable(value) for value in outputs)
    if not isinstance(outputs, dict) or not any(
        isinstance(value, LazyLogits) for value in dict.values(outputs)
    ):
        return outputs
    if type(outputs) is dict:
        return {name: readable(value) for name, value in outputs.items()}
    object.__setattr__(outputs, "__class__", _computed_when_read(type(outputs)))
    return outputs


@lru_cache(None)  # making a class registers it with torch's pytrees
def _computed_when_read(kind: type) -> type:
    return type(kind.__name__, (_ComputedWhenRead, kind), {"_kind": kind})


class _ComputedWhenRead:
    """Mixed into the class of a model's outputs while their logits are not computed."""

    _kind: type

    def __getattribute__(self, name: str) -> Any:
        if name not in ("loss", "__class__", "__dict__"):
            _compute(self)
        return object.__getattribute__(self, name)

    def __getitem__(self, key: Any) -> Any:
        if key == "loss":
            return dict.__getitem__(self, key)
        if key == 0 and next(iter(dict.keys(self)), None) == "loss":
            return dict.__getitem__(self, "loss")
        return _compute(self)[key]

    def __iter__(self) -> Any:
        return iter(_compute(self))

    def __len__(self) -> int:
        return dict.__len__(self)

    def __reduce__(self) -> Any:
        return _compute(self).__reduce__()


def _compute(outputs: Any) -> Any:
    """Compute the logits and give the outputs their own class back."""
    object.__setattr__(outputs, "__class__", type(outputs)._kind)
    computed_from = []
    for name, value in list(dict.items(outputs)):
        if isinstance(value, LazyLogits):
            made = value.values()
            dict.__setitem__(outputs, name, made)
            vars(outputs)[name] = made
            computed_from.append((made, value.hidden))
    vars(outputs)[COMPUTED_FROM] = computed_from
    return outputs


def named_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by their names."""
    forward = getattr(model, "_original_forward", model.forward)
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"the model cannot be called so: {error}.") from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"the forward of {type(model).__name__} takes *{name}, so hf_ga cannot call it "
                "with other samples: give its arguments names."
            )
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named
