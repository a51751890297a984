"""A loss of all samples of a window, `Accelerator(whole_batch=...)`, in a user's own loop.

- `begin`, a first pass without gradients: the window's loss, and its gradient at the outputs. In
  the first window it finds out, from a few samples, which outputs the loss uses, and whether they
  depend on padding; in some windows, whether they depend on the other samples of a micro-batch.
- `recording` and `term`, for each micro-batch: the loop's forward draws the same random numbers, so
  it returns the same outputs; their part of the window's loss.
- `add_direct_gradients`: the gradients of parameters that the loss itself uses.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_ga.engine.look.choice import is_rehearsed, number_of
from hf_ga.engine.slots import Slot, extra_rehearsal
from hf_ga.engine.whole.first_pass import run_first_pass
from hf_ga.engine.whole.used_outputs import FewSamples, few_samples, find_used_outputs
from hf_ga.engine.whole.whole_window import (
    FirstPass,
    UsedOutputs,
    WholeBatchLoss,
    WholeWindow,
)
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import ConfigError, DataError, LossNotAdditive, ProcessFailed
from hf_ga.loading.fetch import WindowRequest
from hf_ga.loading.window import Window
from hf_ga.model.forward import (
    argument_filter,
    callable_module,
    module_modes,
    transformers_configs,
    unwrapped,
    without_cache,
)
from hf_ga.model.hooks import Hook
from hf_ga.model.outputs import named_tensors, with_tensors
from hf_ga.model.precision import LOW_PRECISION, full_precision
from hf_ga.parallel.backend import Backend, RankStatus

# Largest relative difference between the outputs of both passes, which differ by rounding at most:
# attention may use another kernel where gradients are needed.
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 5e-2
# Relative difference of a sample's outputs in two padded widths above which all are padded to one.
WIDTH_TOLERANCE = 1e-5


class WholeBatch:
    """The loss of all samples of a window, one window at a time.

    Args:
        engine: Computes the windows of the loop.
        whole_batch: The user's function (outputs of all samples, batch of all samples) -> loss.
        compute_outputs: Computes the outputs from the entries of a batch. None: the prepared model
            does.

    Attributes:
        value: The loss of the current window, a scalar.
    """

    def __init__(
        self,
        engine: WindowEngine,
        whole_batch: WholeBatchLoss,
        compute_outputs: Callable[..., Any] | None = None,
    ) -> None:
        """Start before the first window, with nothing known."""
        self.engine = engine
        self.whole_batch = whole_batch
        self._compute_outputs = compute_outputs
        self._model: nn.Module | None = None  # as it was prepared
        self._loss: WholeWindow | None = None  # once it is known which outputs it uses
        self._known_for: tuple[nn.Module, tuple[bool, ...]] | None = None  # model, its modes
        self._window: Window | None = None
        self._slots: Sequence[Slot] = []
        self._is_checked = False  # whether the current window is looked at closely
        self._first_outputs: list[Any] = []  # of each slot, without those that are not used
        self._differences: list[tuple[str, Tensor, float]] = []  # output, its change, tolerance
        # Of the current iteration
        self._index = 0
        self._versions: dict[int, int] = {}  # id of a tensor of the batch -> its version counter
        self._outputs: Any = None  # what the model returned to the loop, until its backward
        self._output_versions: dict[str, tuple[Tensor, int]] = {}

    @property
    def value(self) -> Tensor:
        """The loss of the current window, a scalar without gradient."""
        return self._loss.value

    # Before the loop's iterations

    def planned(self, window: Window, models: Sequence[nn.Module]) -> Window:
        """Return a window as it is computed: padded to its longest sample if the loss needs that,
        or as long as it is not known whether it does.

        Args:
            window: The window.
            models: The prepared models that are trained.

        Raises:
            ConfigError: If the loop is not one that whole_batch supports.
            DataError, ConfigError: If its batches cannot be padded, but must be.
        """
        self._model = _only_model(models)
        state = window.state
        if state.is_width_tried and not state.pad_to_window:
            return window
        try:
            return window.padded_to_window()
        except (ConfigError, DataError):
            if state.pad_to_window:
                raise
            return window

    @property
    def used(self) -> UsedOutputs:
        """The outputs that the loss uses, after the first window."""
        return self._loss.used

    def adopt(self, model: nn.Module, used: UsedOutputs) -> None:
        """Take over which outputs the loss uses from another process.

        Args:
            model: The model in training mode, as `planned` gets it, which may have no weights yet.
            used: The outputs that the loss uses.
        """
        self._loss = WholeWindow(self.whole_batch, used)
        self._known_for = _with_modes(model)

    def begin(
        self, window: Window, slots: Sequence[Slot], request: WindowRequest | None = None
    ) -> None:
        """Compute the loss of a window, and its gradient at the model's outputs. A collective.

        Args:
            window: The window, which `engine` has begun.
            slots: The iterations of the loop in it.
            request: What keys its random draws. None: the window's own plan.

        Raises:
            ConfigError: If the loss uses parameters that are sharded.
            ProcessFailed: If another process failed.
            Others: See `WholeWindow.prepare`.
        """
        backend = self.engine.gradient.backend
        request = request or window.request
        self._window = window
        self._slots = slots
        self._differences = []
        self._is_checked = is_rehearsed(number_of(window))
        with without_cache(transformers_configs(self._model)):
            self._find_out(window, request)
            status = RankStatus()
            try:
                rehearsal = self._rehearsal()
                self._first_outputs = run_first_pass(
                    self.engine, [*slots, *rehearsal], request, self._first_forward
                )
                if rehearsal:
                    self._compare_companies(rehearsal[0], self._first_outputs.pop())
                first_pass = self._first_pass(backend, status)
                self._loss.prepare(first_pass, is_checked=self._is_checked)
            except ProcessFailed:
                raise
            except Exception as error:
                if backend.is_sharded:
                    raise
                status.failure = error
            finally:
                self.engine.slot = None
            backend.all_reduce_status(status)  # raises the error of a rank on all ranks

    def _find_out(self, window: Window, request: WindowRequest) -> None:
        """Find out, if it is not known, which outputs the loss uses, and whether they depend on
        padding. A collective.
        """
        backend = self.engine.gradient.backend
        is_known = self._known_for == _with_modes(self._model)
        # Where nothing else is known, all windows of shards are padded.
        tries_widths = not (window.state.is_width_tried or backend.is_sharded)
        if is_known and not (tries_widths and self._is_checked):
            return
        self._is_checked = True
        # Forwards of shards are collectives: the other ranks would wait in them.
        together = nullcontext() if backend.is_sharded else backend.failing_on_all_ranks()
        needs_padding = False
        with together:
            few = few_samples(window)
            outputs = self._outputs_of_few(few, request)
            used = self._loss.used if is_known else self._used_outputs(few, outputs)
            needs_padding = few.have_two_widths and self._depend_on_width(outputs, used)
        if not is_known:
            if backend.num_processes > 1:
                (used,) = broadcast_object_list([used])
            self._loss = WholeWindow(self.whole_batch, used)
            self._known_for = _with_modes(self._model)
        if tries_widths and backend.max_over_ranks(int(few.have_two_widths)):
            window.state.is_width_tried = True
            window.state.pad_to_window |= bool(backend.max_over_ranks(int(needs_padding)))
        if window.state.pad_to_window and not window.request.pad_to_window:
            window.padded_to_window()  # raises the error of batches that cannot be padded

    def _outputs_of_few(self, few: FewSamples, request: WindowRequest) -> list[Any]:
        """Return the outputs of each of the micro-batches of a few samples, in float32 where the
        weights are.
        """
        model = unwrapped(self._model)
        is_low = any(p.dtype in LOW_PRECISION for p in model.parameters())
        is_precise = not is_low and not self.engine.backend.is_sharded
        with full_precision(model) if is_precise else nullcontext():
            return run_first_pass(self.engine, few.slots, request, self._forward)

    def _used_outputs(self, few: FewSamples, outputs: Sequence[Any]) -> UsedOutputs:
        """Return the outputs that the loss uses."""
        return find_used_outputs(
            self.whole_batch,
            outputs[0],
            outputs[1],
            self.engine.backend.place(few.all.batch),
            (len(few.all), len(few.some)),
            self.engine.gradient.parameters,
        )

    def _depend_on_width(self, outputs: Sequence[Any], used: UsedOutputs) -> bool:
        """Whether the outputs of the shortest samples are others without padding."""
        padded, _, alone = map(named_tensors, outputs)
        for name in used.per_sample | used.without_gradient:
            other = alone[name]
            rows = padded[name][-len(other) :]
            if rows.shape != other.shape:
                return True
            is_low = rows.dtype in LOW_PRECISION
            tolerance = LOW_PRECISION_TOLERANCE if is_low else WIDTH_TOLERANCE
            if not float(_relative_difference(other, rows)) <= tolerance:
                return True
        return False

    def _rehearsal(self) -> list[Slot]:
        """Return a micro-batch of some samples of the window in other company, if one is due."""
        if not self._is_checked:
            return []
        num_processes = self.engine.backend.num_processes
        rehearsal = extra_rehearsal(self._window, num_processes=num_processes, is_first=True)
        return [] if rehearsal is None else [rehearsal]

    def _compare_companies(self, rehearsal: Slot, outputs: Any) -> None:
        """Compare the outputs of samples with those in other company."""
        tensors = named_tensors(outputs)
        positions = rehearsal.micro_batch.positions.tolist()
        for slot, of_slot in zip(self._slots, self._first_outputs, strict=True):
            own = slot.micro_batch.positions.tolist()
            common = [position for position in own if position in positions]
            for name, tensor in named_tensors(of_slot).items():
                other = tensors.get(name)
                is_rows = name in self._loss.used.per_sample and tensor.is_floating_point()
                if (
                    not common
                    or not is_rows
                    or other is None
                    or other.shape[1:] != tensor.shape[1:]
                ):
                    continue
                here = tensor[[own.index(position) for position in common]]
                there = other[[positions.index(position) for position in common]]
                difference = float(_relative_difference(here, there))
                if difference > self._tolerance(tensor):
                    raise LossNotAdditive(
                        f"the model's {name!r} of some samples differs from that among other "
                        f"samples (relative difference {difference:.1e}), so it depends on the "
                        "other samples of its micro-batch (BatchNorm, a comparison of samples). "
                        "Compare samples in whole_batch only."
                    )

    def _first_pass(self, backend: Backend, status: RankStatus) -> FirstPass:
        """Return the inputs of `WholeWindow.prepare`."""
        if backend.is_sharded and self._loss.used.uses_parameters:
            raise ConfigError(
                "under FSDP whole_batch cannot use parameters directly, which are sharded: let the "
                "model's forward return them among its outputs (a temperature as a scalar)."
            )
        return FirstPass(
            window=self._window,
            slots=self._slots,
            outputs=self._first_outputs,
            parameters=self.engine.gradient.parameters,
            backend=backend,
            status=status,
        )

    def _forward(self, slot: Slot) -> Any:
        """Run the forward of an iteration; return its outputs."""
        batch = self.engine.backend.place(slot.micro_batch.batch)
        if self._compute_outputs is not None:
            return self._compute_outputs(**batch)
        return callable_module(self._model)(**argument_filter(self._model)(batch))

    def _first_forward(self, slot: Slot) -> Any:
        """Run the forward of an iteration; return those of its outputs that the loss uses."""
        outputs = self._forward(slot)
        tensors = named_tensors(outputs)
        used = {name: tensors[name] for name in self._loss.used.names if name in tensors}
        return with_tensors(outputs, used)

    # Iterations of the loop

    @contextmanager
    def recording(self, index: int, batch: dict[str, Any]) -> Iterator[None]:
        """Record what the model returns to the loop in the block.

        Args:
            index: Index of the iteration in the window.
            batch: Its batch on the device, as the loop gets it.
        """
        self._index = index
        self._outputs = None
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        self._versions = {id(tensor): tensor._version for tensor in tensors}
        model = self._model
        hooks = [model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True)]
        # A wrapper such as DDP runs its hooks last, so that its own outputs are recorded.
        hooks += [m.register_forward_hook(Hook(self._record)) for m in {model, unwrapped(model)}]
        try:
            yield
        finally:
            self._outputs = None
            for hook in hooks:
                hook.remove()

    def _before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check how the loop calls the model: once, with the tensors of the batch."""
        if not _is_training(model):
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any(self._versions.get(id(tensor)) != tensor._version for tensor in tensors):
            raise ConfigError(
                "whole_batch needs the model to be called as model(**batch), with the batch that "
                "the loader returned: its forward runs once more before the loop's."
            )
        if self._outputs is not None:
            raise ConfigError(
                "with whole_batch, the model ran twice on one batch in training mode, but the loss "
                "of the window was computed from one forward of each micro-batch: let the model's "
                "forward return what both runs compute."
            )

    def _record(self, model: nn.Module, args: tuple, outputs: Any) -> None:
        """Record what the model returns to the loop."""
        if not _is_training(model):
            return
        self._outputs = outputs
        tensors = named_tensors(outputs)
        self._output_versions = {name: (t, t._version) for name, t in tensors.items()}

    def term(self, outputs: Any, num_targets: float | Tensor | None) -> tuple[Tensor, float]:
        """Return a micro-batch's part of the window's loss, and its share of the window's samples.

        Both add up, to the loss of the window and to 1, over the micro-batches of all processes.

        Args:
            outputs: What the loop passed to `backward`.
            num_targets: See `Accelerator.backward`; must be None.

        Raises:
            ConfigError: If the loop passed anything but what the model returned.
            LossNotAdditive: If the model did not return what it returned in the first pass.
        """
        if num_targets is not None or not self._is_recorded(outputs):
            raise ConfigError(
                "with whole_batch, accelerator.backward takes what the model returned for this "
                "micro-batch, unchanged and alone: outputs = model(**batch); "
                "accelerator.backward(outputs)."
            )
        self._outputs = None  # one backward for each forward
        return self.part(self._index, outputs)

    def part(self, index: int, outputs: Any) -> tuple[Tensor, float]:
        """Return a micro-batch's part of the window's loss, see `term`.

        Args:
            index: Index of the micro-batch in the window.
            outputs: What the model returned for it.

        Raises:
            LossNotAdditive: If it is not what the model returned in the first pass, or the loss
                uses something besides outputs.
        """
        self._compare_with_first_pass(index, outputs)
        if index == len(self._slots) - 1:
            self._check_differences()
            if self._is_checked:
                self._loss.check_again()
        micro_batch = self._slots[index].micro_batch
        part = self._loss.part(outputs, micro_batch)
        return part, len(micro_batch) / self._window.num_samples

    def _is_recorded(self, outputs: Any) -> bool:
        """Whether the loop passes the object that the model returned, with unchanged tensors."""
        if outputs is None or outputs is not self._outputs:
            return False
        tensors = named_tensors(outputs)
        if tensors.keys() != self._output_versions.keys():
            return False
        for name, tensor in tensors.items():
            recorded, version = self._output_versions[name]
            if tensor is not recorded or tensor._version != version:
                return False
        return True

    def _compare_with_first_pass(self, index: int, outputs: Any) -> None:
        """Note how much what the model returned to the loop differs from the first pass."""
        tensors = named_tensors(outputs)
        firsts = named_tensors(self._first_outputs[index])
        self._first_outputs[index] = None  # not needed any more
        for name, first in firsts.items():
            if first.is_floating_point() and name in tensors:
                output = tensors[name].detach()
                difference = _relative_difference(output, first.detach())  # it may be a parameter
                self._differences.append((name, difference, self._tolerance(output)))

    def _tolerance(self, output: Tensor) -> float:
        """Return how much an output may differ by rounding."""
        is_mixed = self.engine.backend.is_mixed
        is_low_precision = is_mixed or output.dtype in LOW_PRECISION
        return LOW_PRECISION_TOLERANCE if is_low_precision else TOLERANCE

    def _check_differences(self) -> None:
        """Check that the model returned to the loop what it returned in the first pass. Called once
        a window, as it waits for the device.
        """
        for name, difference, tolerance in self._differences:
            if float(difference) > tolerance:  # not if it is NaN, as the outputs are then
                raise LossNotAdditive(
                    f"the model's {name!r} in the loop's forward differs from that in the first "
                    f"pass of whole_batch over the window (relative difference "
                    f"{float(difference):.1e}), so the gradient of the window's loss would be "
                    "wrong. Likely causes: the loop draws random numbers before the forward, "
                    "leaves out entries of the batch, or changes the model within a window."
                )

    # The window's end

    def add_direct_gradients(self) -> None:
        """Add the gradients of parameters that the loss itself uses to their `.grad`, which already
        has the gradient through the model's outputs.
        """
        for parameter, gradient in self._loss.direct_gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._first_outputs = []


def _relative_difference(output: Tensor, first: Tensor) -> Tensor:
    """Return the norm of the difference of two outputs over the norm of the first, on the device:
    infinite if the shapes differ. Infinities in both (masked logits) do not count.
    """
    if output.shape != first.shape:
        return torch.full((), float("inf"), device=first.device)
    output = output.float()
    first = first.float()
    change = torch.where(output == first, 0.0, output - first)
    size = torch.where(first.isinf(), 0.0, first).norm()
    return change.norm() / size.clamp(min=1e-12)


def _is_training(model: nn.Module) -> bool:
    """Whether a forward of the loop is one that it trains on."""
    return model.training and torch.is_grad_enabled()


def _only_model(models: Sequence[nn.Module]) -> nn.Module:
    """Return the model that is trained, if there is exactly one, which FSDP1 does not shard."""
    if len(models) != 1:
        raise ConfigError(
            "whole_batch needs exactly one prepared model in training mode, got "
            f"{len(models)}: put them into one module, or call eval() on those that are not "
            "trained."
        )
    (model,) = models
    if isinstance(model, FullyShardedDataParallel):
        raise ConfigError(
            "whole_batch does not support FSDP1, whose shards it cannot test: use FSDP2 "
            "(fsdp_version=2) or DDP."
        )
    return model


def _with_modes(model: nn.Module) -> tuple[nn.Module, tuple[bool, ...]]:
    """Return a model without wrappers, and which of its modules are in training mode."""
    inner = unwrapped(model)
    return inner, module_modes(inner)
