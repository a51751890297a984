"""Records what a model's forward returned during one micro-batch of a user's loop."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.accelerator.criteria import CriteriaRecorder
from hf_ga.errors import ConfigError, HfGaError
from hf_ga.exact.forward import get_output, unwrapped
from hf_ga.exact.outputs import named_tensors
from hf_ga.speed.lazy_logits import LazyLogits

# The attribute of a model's outputs with (logits, hidden states they were computed from) pairs.
LOGITS_AND_HIDDEN = "_hf_ga_logits_and_hidden"


# Arguments of a forward that change neither the loss nor what it averages over.
IRRELEVANT_ARGUMENTS = ("return_dict", "output_hidden_states", "output_attentions", "use_cache")
# Arguments that a loop may omit to compute its own loss from the other outputs.
LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")

# Called with the positional and the keyword arguments of a forward.
OnForward = Callable[[tuple, dict[str, Any]], None]


def _version(value: Any) -> int:
    """Return a tensor's version counter, which torch raises at each in-place change, so that
    changes of a batch by the user's loop are noticed; 0 for other values.
    """
    return value._version if isinstance(value, Tensor) else 0


class ForwardRecorder:
    """Records the training forwards of a prepared model by hooks, one per micro-batch.

    A forward is recorded if the model is in training mode with gradients enabled, while a
    micro-batch waits for its backward.

    Args:
        model: The prepared model.
        is_waiting_for_backward: Returns whether a micro-batch was handed out and its backward is
            still to come.
        criteria: Records the loss functions that the loop calls outside of the model.
        leave_micro_batch: Called before an error of hf_ga leaves a forward: gives up the
            micro-batch.
        records_tensors: Whether to record the tensors in the outputs, so that `is_unchanged` can
            find out whether the loop changed them.

    Attributes:
        outputs: What the recorded forward of the current micro-batch returned; None before it.
        prove: If not None, called with the arguments of the next training forward, before it runs,
            and then reset.
        prove_again: If not None, called with the arguments of a forward that gets other tensors
            than the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_waiting_for_backward: Callable[[], bool],
        criteria: CriteriaRecorder,
        leave_micro_batch: Callable[[], None],
        records_tensors: bool,
    ) -> None:
        """Register forward hooks on the model of a user's loop; see the class for the arguments."""
        self.model = model
        self.is_waiting_for_backward = is_waiting_for_backward
        self.criteria = criteria
        self.leave_micro_batch = leave_micro_batch
        self.outputs: Any = None
        self.prove: OnForward | None = None
        self.prove_again: OnForward | None = None
        self._records_tensors = records_tensors
        # Name of an output -> the tensor, and its version counter when the forward returned it.
        self._recorded_tensors: dict[str, tuple[Tensor, int]] = {}
        self._args: tuple = ()
        self._kwargs: dict[str, Any] = {}
        # Name of an entry of the batch -> its value and version counter. None: nothing to compare.
        self._batch: dict[str, tuple[Any, int]] | None = None
        self._is_proving = False
        unwrapped_model = unwrapped(model)
        self._hooks = [
            unwrapped_model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            unwrapped_model.register_forward_hook(self._after_forward),
        ]
        if unwrapped_model is not model:
            # A wrapper such as DDP may return other tensors than the model that it wraps.
            self._hooks.append(model.register_forward_hook(self._after_wrapper_forward))

    def remove(self) -> None:
        """Remove the forward hooks of the user's loop from the prepared model."""
        for hook in self._hooks:
            hook.remove()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the last recorded forward of the user's loop by name."""
        return named_arguments(unwrapped(self.model), self._args, self._kwargs)

    @property
    def num_samples(self) -> int:
        """The number of samples in the last recorded forward of the user's loop: the length of the
        first tensor (other than a scalar) among its arguments.
        """
        tensors = (v for v in self.arguments.values() if isinstance(v, Tensor) and v.dim())
        return len(next(tensors))

    def start(self, batch: dict[str, Any] | None = None) -> None:
        """Forget the outputs of the previous micro-batch, and expect that the user's loop runs a
        forward with a new batch.

        Args:
            batch: The arguments that the forward should get, on the device, or None if any
                arguments are accepted.
        """
        self.outputs = None
        self._batch = None
        if batch is not None:
            self._batch = {name: (value, _version(value)) for name, value in batch.items()}

    def _is_called_with_batch(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether the user's loop calls the model with exactly the batch that the prepared
        loader handed out.

        The tensors must be the same objects, not changed in place. Labels may be omitted, and
        arguments that do not affect the loss, such as `return_dict`, are ignored.

        Args:
            args: The positional arguments of the forward.
            kwargs: The keyword arguments of the forward.

        Returns:
            True also if no batch is expected.
        """
        if self._batch is None:
            return True
        arguments = {
            name: value
            for name, value in named_arguments(unwrapped(self.model), args, kwargs).items()
            if name not in IRRELEVANT_ARGUMENTS and value is not None
        }
        expected = {name for name, (value, _) in self._batch.items() if value is not None}
        expected_without_labels = expected.difference(LABELS)
        if arguments.keys() not in (expected, expected_without_labels):
            return False
        for name, value in arguments.items():
            expected_value, expected_version = self._batch[name]
            if value is not expected_value or _version(value) != expected_version:
                return False
        return True

    def _should_record(self, model: nn.Module) -> bool:
        """Return whether a forward of the model or its wrapper is one that the user's loop trains
        on: in training mode, with gradients, for a micro-batch whose `accelerator.backward` is
        still to come, and not one of a proof.
        """
        is_training = model.training and torch.is_grad_enabled()
        return is_training and self.is_waiting_for_backward() and not self._is_proving

    def _before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the unwrapped model: begin a training forward of the user's loop. If
        hf_ga refuses it, give up the micro-batch before the error is raised.
        """
        if not self._should_record(model):
            return
        try:
            self._begin_forward(args, kwargs)
        except HfGaError:
            self.leave_micro_batch()
            raise

    def _begin_forward(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check and record the arguments of a training forward of the user's loop. The model is
        proven on them first if it is not proven yet, or if they are not the batch that the loader
        handed out.

        Args:
            args: The positional arguments of the forward.
            kwargs: The keyword arguments of the forward.

        Raises:
            ConfigError: If the model runs twice on one batch, or the loop normalizes the loss.
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
        self._args = args
        self._kwargs = kwargs
        self.criteria.turn_off()  # loss functions inside of the model are not the loop's
        # `prove` is set for the first forward of a model that is not proven yet.
        prove = self.prove
        if prove is None and not self._is_called_with_batch(args, kwargs):
            prove = self.prove_again
        if prove is not None:
            self.prove = None
            self._is_proving = True
            try:
                prove(args, kwargs)
            finally:
                self._is_proving = False
            self.criteria.turn_off()  # the proof turned it on, but the forward is still to come

    def _after_forward(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook of the unwrapped model: record what it returned, and watch the loss
        functions that the loop calls from now on.

        Returns:
            The outputs with logits that are computed when the loop reads them; None, which leaves
            the outputs as they are, for a forward of a proof or outside of a micro-batch.
        """
        if not self.is_waiting_for_backward() or self._is_proving:
            return None
        output = make_readable(output)
        if self._should_record(model):
            self._record(output)
            self.criteria.turn_on()
        return output

    def _after_wrapper_forward(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook of a wrapper such as DDP: record its outputs in place of the inner model's,
        as these are the ones that the loop gets.
        """
        if self._should_record(model):
            self._record(output)

    def _record(self, outputs: Any) -> None:
        """Store the outputs of a training forward of the user's loop and, if `records_tensors`, the
        version counters of their tensors, which show later in-place changes.
        """
        self.outputs = outputs
        if self._records_tensors:
            tensors = named_tensors(outputs)
            self._recorded_tensors = {
                name: (tensor, tensor._version) for name, tensor in tensors.items()
            }

    def is_unchanged(self, outputs: Any) -> bool:
        """Return whether the outputs that a user's loop passes to `accelerator.backward` are the
        very object that the model returned, with the same tensors, not changed in place.

        Only for a recorder with `records_tensors`.

        Args:
            outputs: What the loop passed to `accelerator.backward`.
        """
        if outputs is not self.outputs:
            return False
        tensors = named_tensors(outputs)
        if tensors.keys() != self._recorded_tensors.keys():
            return False
        for name, tensor in tensors.items():
            recorded_tensor, recorded_version = self._recorded_tensors[name]
            if tensor is not recorded_tensor or tensor._version != recorded_version:
                return False
        return True


def model_loss_of(outputs: Any) -> Tensor | None:
    """Return the loss that the model of a user's loop itself computed from the labels, taken from
    the model's outputs.

    It is `outputs.loss`, the first entry of a tuple if that is a scalar, or `outputs` if that is a
    scalar tensor. Logits that are not computed yet stay so.

    Returns:
        None if there is no loss, or one that does not require a gradient.
    """
    if isinstance(outputs, _LazyOutputs):
        loss = dict.get(outputs, "loss")
    else:
        first = outputs[0] if type(outputs) is tuple and outputs else outputs
        loss = first if isinstance(first, Tensor) else get_output(first, "loss")
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    return None


def output_tensors(outputs: Any, *, requires_grad: bool = True) -> list[Tensor]:
    """Collect the tensors in the outputs of the model of a user's loop, also from nested dicts,
    lists and tuples, to compare the loop's loss with them.

    Logits that are computed lazily are replaced by the hidden states that they are computed from.

    Args:
        outputs: What a model returned.
        requires_grad: If True, collect the tensors that require a gradient, except the model's own
            loss; if False, collect all floating-point tensors.
    """
    loss = model_loss_of(outputs)
    tensors: list[Tensor] = []
    if isinstance(outputs, _LazyOutputs):
        _collect_tensors(list(dict.values(outputs)), tensors)
    else:
        _collect_tensors(outputs, tensors)
    logits_and_hidden = getattr(outputs, "__dict__", {}).get(LOGITS_AND_HIDDEN, [])
    for logits, hidden in logits_and_hidden:
        tensors = [hidden if tensor is logits else tensor for tensor in tensors]
    if not requires_grad:
        return [tensor for tensor in tensors if tensor.is_floating_point()]
    return [tensor for tensor in tensors if tensor is not loss and tensor.requires_grad]


def _collect_tensors(value: Any, tensors: list[Tensor]) -> None:
    """Append all tensors in a (nested) value of the outputs of a user's model to a list.

    Args:
        value: A tensor, lazy logits (their hidden states are appended), a mapping, list or tuple of
            these; anything else is ignored.
        tensors: The list, changed in place.
    """
    if isinstance(value, LazyLogits):
        tensors.append(value.hidden)
    elif isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, Mapping):
        for entry in value.values():
            _collect_tensors(entry, tensors)
    elif isinstance(value, list | tuple):
        for entry in value:
            _collect_tensors(entry, tensors)


def make_readable(outputs: Any) -> Any:
    """Prepare a model's outputs with lazy logits for a user's loop, which expects plain tensors.

    A `ModelOutput` stays lazy: its class is replaced, in place, by one that computes the logits
    when anything but the loss is read. In a plain dict or a tuple, the logits are computed now.

    Args:
        outputs: What a model returned.

    Returns:
        The outputs; the same object if there are no lazy logits.
    """
    if isinstance(outputs, LazyLogits):
        return outputs.materialize()
    if isinstance(outputs, tuple) and any(isinstance(v, LazyLogits) for v in outputs):
        return type(outputs)(make_readable(value) for value in outputs)
    if not isinstance(outputs, dict):
        return outputs
    if not any(isinstance(value, LazyLogits) for value in dict.values(outputs)):
        return outputs
    if type(outputs) is dict:
        return {name: make_readable(value) for name, value in outputs.items()}
    object.__setattr__(outputs, "__class__", _lazy_class_of(type(outputs)))
    return outputs


@lru_cache(None)  # making a class registers it with torch's pytrees, so make it once
def _lazy_class_of(output_class: type) -> type:
    """Return the subclass of a `ModelOutput` class whose logits are computed when a user's loop
    first reads them.
    """
    bases = (_LazyOutputs, output_class)
    return type(output_class.__name__, bases, {"_output_class": output_class})


class _LazyOutputs:
    """Mixin for the class of a model's outputs while their logits are not computed yet.

    Reading the loss computes nothing; any other access computes the logits, and gives the object
    its original class back.
    """

    _output_class: type  # the original class

    def __getattribute__(self, name: str) -> Any:
        """Read an attribute of a model's outputs in a user's loop. For any but the loss, the logits
        are computed first.
        """
        if name not in ("loss", "__class__", "__dict__"):
            _compute_logits(self)
        return object.__getattribute__(self, name)

    def __getitem__(self, key: Any) -> Any:
        """Read an entry of a model's outputs by name or index in a user's loop. For any but the
        loss, the logits are computed first.
        """
        if key == "loss":
            return dict.__getitem__(self, key)
        if key == 0 and next(iter(dict.keys(self)), None) == "loss":
            return dict.__getitem__(self, "loss")
        return _compute_logits(self)[key]

    def __iter__(self) -> Any:
        """Compute the logits, and iterate over the names of a model's outputs in a user's loop."""
        return iter(_compute_logits(self))

    def __len__(self) -> int:
        """Return the number of the model's outputs, without computing the logits."""
        return dict.__len__(self)

    def __reduce__(self) -> Any:
        """Compute the logits of a model's outputs, and pickle them as their original class does."""
        return _compute_logits(self).__reduce__()


def _compute_logits(outputs: Any) -> Any:
    """Compute the lazy logits of a model's outputs in place when a user's loop reads them, and
    restore the outputs' class.

    The hidden states that the logits were computed from are kept in an attribute, where
    `output_tensors` finds them.

    Args:
        outputs: Outputs whose class is one of `_lazy_class_of`.

    Returns:
        The same object.
    """
    object.__setattr__(outputs, "__class__", type(outputs)._output_class)
    logits_and_hidden = []
    for name, value in list(dict.items(outputs)):
        if isinstance(value, LazyLogits):
            logits = value.materialize()
            dict.__setitem__(outputs, name, logits)
            vars(outputs)[name] = logits
            logits_and_hidden.append((logits, value.hidden))
    vars(outputs)[LOGITS_AND_HIDDEN] = logits_and_hidden
    return outputs


def named_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a user's loop calls a model's forward by name; those of its
    `**kwargs` are merged in.

    Args:
        model: The unwrapped model.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        ConfigError: If the forward does not accept these arguments, or takes `*args`, which have no
            names.
    """
    # Accelerate replaces `forward` for mixed precision, and keeps the model's own here.
    forward = getattr(model, "_original_forward", model.forward)
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"the model cannot be called with these arguments: {error}.") from error
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"the forward of {type(model).__name__} takes *{name}, so hf_ga cannot call it "
                "with other samples: give its arguments names."
            )
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    return arguments
