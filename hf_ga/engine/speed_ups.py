"""Speed-ups for a loop that runs its own forwards: packing, chunked loss, fused attention, ...

They are used for a model that the loop calls once in each micro-batch, with named arguments, and
whose own loss it passes to `backward`. The first window shows whether it does. Each speed-up is
tried on one micro-batch, with and without it, and left out if loss or gradient differ: not under
FSDP, where that is a collective, but `hf_ga.prepare` tries before it shards. Windows with a
rehearsal are computed without speed-ups.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._triton import has_triton

from hf_ga.draws.generators import preserved_random_states
from hf_ga.draws.keyed import KeyedDraws, KnownDraws
from hf_ga.engine.gradient import WindowGradient
from hf_ga.engine.parameter_hooks import hooks_suspended
from hf_ga.engine.slots import Slot
from hf_ga.engine.sums.readings import Reading, TermKey, on_host
from hf_ga.loading.batches import structure_of
from hf_ga.logs import get_logger
from hf_ga.model.forward import (
    Batch,
    compiled_modules,
    extra_forwards,
    force_eager,
    fresh_gradients,
    get_output,
    head_loss,
    unwrapped,
)
from hf_ga.model.hooks import Hook
from hf_ga.model.precision import LOW_PRECISION, full_precision
from hf_ga.order.length_plan import Computed
from hf_ga.rows.fused_attention import FusedAttention
from hf_ga.rows.packing import Packing, can_run_rows
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward
from hf_ga.speed.speed_up import Call, SpeedUp, acting
from hf_ga.speed.watched_outputs import watched

logger = get_logger(__name__)

# Maximum relative error of loss and gradient in a trial: that of rounding.
TOLERANCE = 1e-4
FLOOR = 1e-2  # of the norm of all gradients: the relative error of less is rounding
LOW_PRECISION_TOLERANCE = 2e-2  # of a model whose weights are fp16 or bf16
# Nodes between the model's own loss and what the loop passes to `backward`: factors, conversions.
MULTIPLES = {
    "DivBackward0", "DivBackward1", "MeanBackward0", "MulBackward0", "MulBackward1",
    "ReshapeAliasBackward0", "ToCopyBackward0", "ViewBackward0",
}  # fmt: skip


@dataclass(frozen=True)
class ChosenSpeedUps:
    """The speed-ups that passed their trials on a model, for other processes.

    Attributes:
        names: Their names.
        left_out: Name of another one -> why it is not used.
        structure: Structure of the model's arguments in the trials.
        plain_keys: A term as it is read with speed-ups -> the same term without them.
        plain_keys_by_kind: The kinds of the terms of a loss -> the terms without speed-ups.
        draws: What is known about the random draws.
        padded_sides: Sides on which samples were padded in the trials of packing.
    """

    names: tuple[str, ...]
    left_out: Mapping[str, str]
    structure: frozenset | None
    plain_keys: Mapping[TermKey, TermKey]
    plain_keys_by_kind: Mapping[tuple[str, ...], list[TermKey]]
    draws: KnownDraws
    padded_sides: frozenset[str]


@dataclass(frozen=True)
class Trial:
    """A micro-batch computed with some speed-ups.

    Attributes:
        loss: Its mean loss.
        gradients: Of each trainable parameter.
        readings: How the loss is read.
    """

    loss: float
    gradients: list[Tensor]
    readings: list[Reading]


class SpeedUps:
    """Chooses the speed-ups of a loop, and uses them in its forwards.

    Args:
        draws: Keys the random draws of the micro-batches.

    Attributes:
        used: The speed-ups that passed their trials.
        left_out: Name of another one -> why it is not used, or was not tried yet.
        num_used: In how many forwards each was used so far, by name.
        candidates: Returns the speed-ups to try on a model.
        is_resumed: Whether the run goes on after a checkpoint: the first window here may use them.
    """

    def __init__(self, draws: KeyedDraws) -> None:
        """Start before the first window."""
        self._draws = draws
        self._model: nn.Module | None = None
        self._gradient: WindowGradient | None = None
        self.candidates = candidates
        self.is_resumed = False
        self.start(None)

    def start(self, model: nn.Module | None) -> None:
        """Start with a model of which nothing is known."""
        self._model = model
        self.used: list[SpeedUp] = []
        self.left_out: dict[str, str] = {}
        self.num_used: dict[str, int] = {}
        self._untried = [] if model is None else self.candidates(model)
        obstacle = None if model is None else obstacle_to_all(model)
        if obstacle is not None:
            self._leave_out(self._untried, obstacle)
        self._structure: frozenset | None = None  # of the arguments in the trials
        # A term as it is read with speed-ups -> the same term without them.
        self._plain_keys: dict[TermKey, TermKey] = {}
        # For sharded models, whose parameters in the graph are others than in the trials.
        self._plain_keys_by_kind: dict[tuple[str, ...], list[TermKey]] = {}
        self._num_windows = 1 if self.is_resumed else 0
        self._may_use = False  # in this window
        self._is_trying = False
        self._max_tokens: int | None = None
        self._leave_micro_batch()

    def _leave_micro_batch(self) -> None:
        """Forget the current micro-batch."""
        self._slot: Slot | None = None
        self._num_forwards = 0
        self._own_loss: Node | None = None  # the node of the model's own loss
        self._call: Call | None = None
        self._current: list[SpeedUp] = []  # those that the forward used
        self._forward = ExitStack()

    @property
    def computed(self) -> Computed:
        """Which tokens are computed in windows without a rehearsal."""
        for speed_up in self.used:
            if isinstance(speed_up, Packing):
                return Computed.ROWS if speed_up.is_compiled else Computed.REAL
        return Computed.PADDED

    def may_run_rows(self, models: Sequence[nn.Module]) -> bool:
        """Whether the models' compiled layers run on rows, or may after the trials."""
        model = unwrapped(models[0]) if len(models) == 1 else None
        if model is None or Packing.name in self.left_out:
            return False
        compiled = compiled_modules(model)
        return bool(compiled) and can_run_rows(model, compiled)

    # Windows and micro-batches

    @contextmanager
    def window(
        self,
        models: Sequence[nn.Module],
        gradient: WindowGradient,
        *,
        is_rehearsed: bool,
        is_ordered: bool = False,
        max_tokens: int | None = None,
    ) -> Iterator[None]:
        """Observe the forwards of a window, and use speed-ups in them.

        Args:
            models: The prepared models that are trained.
            gradient: The window's gradient.
            is_rehearsed: Whether samples of the window are compared with their rehearsal.
            is_ordered: Whether the window has the same bits on any number of processes, which try
                different micro-batches.
            max_tokens: Maximum number of real tokens of a micro-batch in this run. None: unknown.
        """
        self._max_tokens = max_tokens
        model = unwrapped(models[0]) if len(models) == 1 else None
        if model is not self._model:
            self.start(model)
        self._gradient = gradient
        self._num_windows += 1
        self._may_use = self._num_windows > 1 and not is_rehearsed
        if gradient.backend.is_sharded or is_ordered:
            self._untried = []
        if self._may_use and self.used:  # a rehearsal hooks layers, too
            self._leave_out_changed(models)
        if not (self.used or self._untried):
            yield
            return
        with ExitStack() as stack:
            before = model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True)
            stack.callback(before.remove)
            after = model.register_forward_hook(Hook(self._after_forward), always_call=True)
            stack.callback(after.remove)
            yield

    @contextmanager
    def micro_batch(self, slot: Slot) -> Iterator[None]:
        """Observe what the loop does with a micro-batch."""
        self._leave_micro_batch()
        self._slot = slot
        try:
            yield
        finally:
            self._forward.close()  # left open if the forward was interrupted
            self._leave_micro_batch()

    # Forwards

    def _before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: use the speed-ups that fit the micro-batch."""
        is_training = model.training and torch.is_grad_enabled()
        if self._slot is None or self._is_trying or not is_training:
            return
        self._num_forwards += 1
        if self._num_forwards > 1 or args or not kwargs:
            self._give_up("the loop does not call the model once, with named arguments")
        if any(isinstance(v, Tensor) and v.requires_grad for v in kwargs.values()):
            self._give_up("the loop computes inputs of the model that need a gradient")
        if not self._may_use or not (self.used or self._untried):
            return
        call = self._call_of(kwargs)
        self._try(call)
        # Compiled layers that may yet run on rows would be compiled twice.
        if self._untried and self.may_run_rows([model]):
            self._forward.enter_context(force_eager())
        if structure_of(kwargs) != self._structure:
            return
        self._call = call
        self._current = [speed_up for speed_up in self.used if speed_up.fits(call)]
        for speed_up in self._current:
            self.num_used[speed_up.name] = self.num_used.get(speed_up.name, 0) + 1
        self._forward.enter_context(acting(self._current, call))

    def _after_forward(self, model: nn.Module, args: tuple, outputs: Any) -> Any:
        """Forward hook of the model: keep its own loss, and observe whether more is read."""
        if self._slot is None or self._is_trying:
            return None
        self._forward.close()
        if outputs is None or not (model.training and torch.is_grad_enabled()):
            return None
        first = outputs[0] if type(outputs) is tuple and outputs else outputs
        loss = first if isinstance(first, Tensor) else get_output(first, "loss")
        self._own_loss = loss.grad_fn if isinstance(loss, Tensor) else None
        return watched(outputs, self._leave_out_lazy)

    def _call_of(self, arguments: Batch) -> Call:
        """Return the inputs of a forward as speed-ups get them: what they read on the host is
        copied there, as it may differ from what the collate function returned.
        """
        micro_batch = self._slot.micro_batch
        entries = {}
        if any(isinstance(speed_up, Packing) for speed_up in (*self.used, *self._untried)):
            for name in ("attention_mask", "labels"):
                value = arguments.get(name)
                if isinstance(value, Tensor) and value.shape[:1] == (len(micro_batch),):
                    entries[name] = value.cpu()
        micro_batch = replace(micro_batch, batch=entries)
        return Call(
            micro_batch,
            batch=dict(arguments),
            keys=self._draws.keys,
            max_tokens=self._max_tokens,
        )

    # Backwards

    def read(self, loss: Tensor, num_targets: float | Tensor | None) -> list[Reading]:
        """Read a loss that the loop passes to `backward`: its terms have the same keys with and
        without speed-ups. See `WindowGradient.read`.

        The window must be computed once more if the forward used speed-ups that the loss does not
        allow.
        """
        readings = self._gradient.read(loss, len(self._slot.micro_batch), num_targets)
        if not self._is_own_loss(loss):
            self._give_up("the loop passes another loss than the model's own")
        keys = self._keys_without_speed_ups(readings)
        if self._current and keys is None:
            self._give_up("the loss has other terms than in the trial")
        if keys is None:
            return [replace(r, key=self._plain_keys.get(r.key, r.key)) for r in readings]
        return [replace(r, key=key) for r, key in zip(readings, keys, strict=True)]

    def _keys_without_speed_ups(self, readings: Sequence[Reading]) -> list[TermKey] | None:
        """Return the keys that the terms of a loss have without speed-ups; None if it has other
        terms than in the trials.
        """
        if self._gradient.backend.is_sharded and self._call is not None:
            return self._plain_keys_by_kind.get(_kinds_of(readings))
        if all(r.term is None or r.key in self._plain_keys for r in readings):
            return [self._plain_keys.get(r.key, r.key) for r in readings]
        return None

    def in_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward, which may compute parts of the forward again."""
        if not self._current:
            return nullcontext()
        return acting(self._current, self._call)

    def _is_own_loss(self, loss: Tensor) -> bool:
        """Whether a loss is the model's own, or a multiple of it."""
        node = loss.grad_fn
        while node is not self._own_loss:
            inputs = [] if node is None else [child for child, _ in node.next_functions if child]
            if node is None or node.name() not in MULTIPLES or len(inputs) != 1:
                return False
            node = inputs[0]
        return node is not None

    # Choice

    def chosen(self) -> ChosenSpeedUps:
        """Return what passed the trials."""
        names = tuple(speed_up.name for speed_up in self.used)
        sides = [s.tried_sides for s in self.used if isinstance(s, Packing)]
        return ChosenSpeedUps(
            names,
            dict(self.left_out),
            self._structure,
            dict(self._plain_keys),
            dict(self._plain_keys_by_kind),
            self._draws.known(),
            frozenset().union(*sides),
        )

    def adopt(self, model: nn.Module, chosen: ChosenSpeedUps) -> None:
        """Use what passed the trials of another process on the same model.

        Args:
            model: The model of this process, which may have no weights yet.
            chosen: What passed there.
        """
        self.start(model)
        self._num_windows = 1
        self._draws.adopt(chosen.draws)  # speed-ups ask where the dropout masks are
        # Not those for the device of the model, which has none without weights.
        for speed_up in (LeanForward(), ChunkedLoss(), FusedAttention(), Packing()):
            if speed_up.name in chosen.names:
                speed_up.attach(model, self._draws)
                self.used.append(speed_up)
            if isinstance(speed_up, Packing):
                speed_up.tried_sides = set(chosen.padded_sides)
        self._untried = []
        self.left_out = dict(chosen.left_out)
        self._structure = chosen.structure
        self._plain_keys = dict(chosen.plain_keys)
        self._plain_keys_by_kind = dict(chosen.plain_keys_by_kind)

    def _give_up(self, reason: str) -> None:
        """Use no speed-ups from now on."""
        if self._current:
            self._gradient.must_repeat = f"speed-ups were used, but {reason}"
            self._gradient.has_other_keys = True
        self._leave_out([*self.used, *self._untried], reason)

    def _leave_out_changed(self, models: Sequence[nn.Module]) -> None:
        """Leave out what a model does not allow that was changed or sharded after the trials."""
        if any(isinstance(model, FullyShardedDataParallel) for model in models):
            self._leave_out_lazy("FSDP1 reads other outputs than the loss")
        compiled = compiled_modules(self._model)
        for speed_up in self.used:
            reason = speed_up.obstacle(compiled)
            if reason is not None:
                self._leave_out([speed_up], reason)

    def _leave_out_lazy(self, reason: str = "the loop reads other outputs than the loss") -> None:
        """Use no speed-up from now on that changes outputs other than the loss."""
        changing = [s for s in (*self.used, *self._untried) if isinstance(s, Packing | ChunkedLoss)]
        self._leave_out(changing, reason)

    def _leave_out(self, speed_ups: Sequence[SpeedUp], reason: str) -> None:
        """Use some speed-ups no more."""
        for speed_up in speed_ups:
            self.left_out[speed_up.name] = reason
            logger.info(f"hf_ga: not used from now on: {speed_up.name}: {reason}.")
        self.used = [speed_up for speed_up in self.used if speed_up not in speed_ups]
        self._untried = [speed_up for speed_up in self._untried if speed_up not in speed_ups]

    def _try(self, call: Call) -> None:
        """Try the speed-ups that fit a micro-batch, together with those that have passed before.

        One passes if loss and gradient are the same with and without it, up to rounding, and the
        loss is a sum of as many terms with the same divisors.
        """
        fitting = []
        for speed_up in self._untried:
            with speed_up.trial():
                if speed_up.fits(call):
                    fitting.append(speed_up)
                    self.left_out.pop(speed_up.name, None)
                else:
                    self.left_out[speed_up.name] = speed_up.verdict() or "no micro-batch fits"
        if not fitting:
            return
        self._untried = [speed_up for speed_up in self._untried if speed_up not in fitting]
        is_low = any(p.dtype in LOW_PRECISION for p in self._gradient.parameters)
        tolerance = LOW_PRECISION_TOLERANCE if is_low else TOLERANCE
        self._is_trying = True
        try:
            with self._trial_mode(nullcontext() if is_low else full_precision(self._model)):
                plain = self._compute(call, [])
                if not math.isfinite(plain.loss):  # no targets, which shows nothing
                    self._untried += fitting
                    return
                self._structure = self._structure or structure_of(call.batch)
                self._plain_keys |= {term.key: term.key for term in plain.readings}
                self._choose(self._attached(fitting), call, plain, tolerance)
                self._read_without_packing(call, plain)
        except Exception as failure:  # of the forward without speed-ups: the loop's will show it
            self._leave_out(fitting, f"{type(failure).__name__}: {failure}")
        finally:
            self._is_trying = False
        names = ", ".join(speed_up.name for speed_up in self.used) or "none"
        logger.info(f"hf_ga: speed-ups in use: {names}; left out: {self.left_out or 'none'}.")

    @contextmanager
    def _trial_mode(self, precision: AbstractContextManager[None]) -> Iterator[None]:
        """Keep everything as it is but the model's gradients, and compute precisely."""
        matmul_precision = torch.get_float32_matmul_precision()
        with preserved_random_states(), extra_forwards(self._model), force_eager(), precision:
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(matmul_precision)

    def _attached(self, speed_ups: Sequence[SpeedUp]) -> list[SpeedUp]:
        """Attach speed-ups to the model, and return those that the model supports."""
        attached = []
        for speed_up in speed_ups:
            reason = speed_up.attach(self._model, self._draws)
            if reason is None:
                attached.append(speed_up)
            else:
                self.left_out[speed_up.name] = reason
        return attached

    def _choose(
        self, speed_ups: Sequence[SpeedUp], call: Call, plain: Trial, tolerance: float
    ) -> None:
        """Use those of some attached speed-ups that pass: all at once, or else all but the last,
        and so on.
        """
        if not speed_ups:
            return
        reason = self._rejection_reason(speed_ups, call, plain, tolerance)
        if reason is not None and len(speed_ups) > 1:
            *others, last = speed_ups
            self._choose(others, call, plain, tolerance)
            if all(speed_up in self.used for speed_up in others):
                self.left_out[last.name] = reason  # these pass without it
            else:
                self._choose([last], call, plain, tolerance)
            return
        for speed_up in speed_ups:
            why_unused = reason or speed_up.verdict()
            if why_unused is None:
                self.used.append(speed_up)
            else:
                self.left_out[speed_up.name] = why_unused

    def _rejection_reason(
        self, speed_ups: Sequence[SpeedUp], call: Call, plain: Trial, tolerance: float
    ) -> str | None:
        """Compute a micro-batch with some more speed-ups, and compare it with the plain one.

        Returns:
            Why they are not used, or None if they may be.
        """
        try:
            trial = self._compute(call, [*self.used, *speed_ups])
        except Exception as failure:  # any error of a forward that does not support one of them
            return f"{type(failure).__name__}: {failure}"
        error = _relative_error(trial, plain)
        if not error <= tolerance:  # also if it is NaN
            return f"it changes loss or gradient (relative error {error:.0e})"
        if not _are_same_terms(trial.readings, plain.readings):
            return "its loss is read as other terms"
        self._learn_keys(trial.readings, plain.readings)
        return None

    def _read_without_packing(self, call: Call, plain: Trial) -> None:
        """Run a forward to read the loss with all used speed-ups but packing, from which not all
        micro-batches gain, where it may be read otherwise than without any.
        """
        others = [speed_up for speed_up in self.used if not isinstance(speed_up, Packing)]
        is_changed = any(key != plain_key for key, plain_key in self._plain_keys.items())
        if not is_changed or len(others) in (0, len(self.used)):
            return
        trial = self._compute(call, others, has_backward=False)
        if _are_same_terms(trial.readings, plain.readings):
            self._learn_keys(trial.readings, plain.readings)

    def _learn_keys(self, readings: Sequence[Reading], plain: Sequence[Reading]) -> None:
        """Note which terms of a loss, as read with some speed-ups, are which without them."""
        self._plain_keys |= {r.key: term.key for r, term in zip(readings, plain, strict=True)}
        plain_keys = [term.key for term in plain]
        for some in (readings, plain):
            self._plain_keys_by_kind[_kinds_of(some)] = plain_keys

    def _compute(
        self, call: Call, speed_ups: Sequence[SpeedUp], *, has_backward: bool = True
    ) -> Trial:
        """Compute loss and gradient of a micro-batch with some speed-ups. Without a backward, the
        gradients are zeros.
        """
        parameters = self._gradient.parameters
        with ExitStack() as stack:
            stack.enter_context(self._draws.rewound())
            for speed_up in speed_ups:
                stack.enter_context(speed_up.trial())
            stack.enter_context(acting(speed_ups, call))
            stack.enter_context(fresh_gradients(parameters))
            stack.enter_context(hooks_suspended(parameters))
            batch = recursively_apply(torch.clone, call.batch)  # which the model may change
            loss = head_loss(self._model(**batch))
            readings = self._gradient.read(loss, len(call.micro_batch), None)
            if has_backward:
                loss.backward()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            for parameter in parameters:
                parameter.grad = None
        return Trial(float(loss.detach()), gradients, on_host(readings))


def _relative_error(trial: Trial, plain: Trial) -> float:
    """Return the largest relative error of a trial's loss and of any parameter's gradient.

    That of a gradient is relative to its own norm plus `FLOOR` times the norm over all parameters,
    so that the rounding of a tiny gradient does not count. NaN counts as infinity.
    """
    loss_error = abs(trial.loss - plain.loss) / max(abs(plain.loss), 1e-12)
    norms = [
        torch.stack([(gradient - reference).norm(), reference.norm()])
        for gradient, reference in zip(trial.gradients, plain.gradients, strict=True)
    ]
    distances, sizes = torch.stack(norms).double().cpu().unbind(1)
    scales = sizes + FLOOR * sizes.norm()
    gradient_error = (distances / scales.clamp(min=1e-30)).max()
    # torch.maximum propagates NaN, unlike Python's max.
    worst = torch.maximum(gradient_error, torch.tensor(loss_error).double())
    return float(worst.nan_to_num(nan=float("inf")))


def candidates(model: nn.Module) -> list[SpeedUp]:
    """Return the speed-ups to try on a model.

    Fused attention is not for compiled layers. Packing pays off on a CPU, and on a GPU with Triton.
    """
    speed_ups: list[SpeedUp] = [LeanForward(), ChunkedLoss()]
    device_type = next(model.parameters()).device.type
    if device_type == "cpu" and not compiled_modules(model):
        speed_ups.append(FusedAttention())
    if device_type == "cpu" or (device_type == "cuda" and has_triton()):
        speed_ups.append(Packing())
    return speed_ups


def obstacle_to_all(model: nn.Module) -> str | None:
    """Return why no speed-up is tried on a model; None if some are."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    if any(getattr(config, "output_router_logits", False) for config in configs):
        return "its router's balancing loss needs a first pass over the window, which is plain"
    if model in compiled_modules(model):
        return "it is compiled as a whole"
    return None


def that_keep_outputs(model: nn.Module) -> list[SpeedUp]:
    """Return the speed-ups to try on a model of which more outputs than the loss are used."""
    return [s for s in candidates(model) if not isinstance(s, Packing | ChunkedLoss)]


def _kinds_of(readings: Sequence[Reading]) -> tuple[str, ...]:
    """Return the kind of node of each term of a loss."""
    return tuple("" if r.term is None else r.term.node.name() for r in readings)


def _are_same_terms(readings: Sequence[Reading], others: Sequence[Reading]) -> bool:
    """Whether two losses are read as the same terms, whatever nodes compute them."""
    if len(readings) != len(others):
        return False
    return all(
        (a.divisor, a.count, a.factor, a.term.is_penalty)
        == (b.divisor, b.count, b.factor, b.term.is_penalty)
        for a, b in zip(readings, others, strict=True)
    )
