"""Errors for loops whose calls would train with a wrong gradient."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hf_ga.errors import ConfigError, UnkeyedRandomness
from hf_ga.loss.identity import VIEWS
from hf_ga.loss.nodes.means import reduction_of
from hf_ga.loss.nodes.saved import inputs, number, saved

ACCUMULATE_REMEDY = (
    "pass gradient_accumulation_steps to Accelerator, put the loop's body into `with "
    "accelerator.accumulate(model):`, and call accelerator.backward for each batch"
)

MULTIPLES = ("NegBackward0", "MulBackward0", "MulBackward1")
ADDITIONS = (
    "AddBackward0",
    "AddBackward1",
    "RsubBackward0",
    "RsubBackward1",
    "SubBackward0",
    "SubBackward1",
)


def division_by_number(loss: Tensor) -> int | None:
    """Return the whole number by which a loss is divided last, such as in `mean / 4`.

    None if there is none, or if it is what a sum is divided by to become a mean.
    """
    node = getattr(loss, "grad_fn", None)  # what is no tensor is refused later
    if node is None or node.name() not in ("DivBackward0", "DivBackward1"):
        return None
    divisor = number(saved(node, "other"))
    divided = node.next_functions[0][0]
    if divided is None or isinstance(divisor, Tensor):
        return None
    if is_sum(divided) or divisor < 2 or not divisor.is_integer():
        return None
    return int(divisor)


def is_multiple(node: Node | None, value: int) -> bool:
    """Whether a node multiplies a loss by a number of this value."""
    if node is None or node.name() not in ("MulBackward0", "MulBackward1"):
        return False
    if len(inputs(node)) > 1:  # by a weight
        return False
    factor = saved(node, "other")
    factor = None if factor is None else number(factor)
    return isinstance(factor, float) and factor == value


def is_sum(node: Node) -> bool:
    """Whether a node adds up nothing but sums over elements, or multiples of them, also by a
    trained weight. What is multiplied by 0 is none: it stands for a loss without targets.
    """
    terms = [term for term in added(node) if not is_multiple(term, 0)]
    return bool(terms) and all(map(_is_one_sum, terms))


def _is_one_sum(node: Node) -> bool:
    """Whether a node that is no addition is such a sum."""
    if node.name() in VIEWS or node.name() in MULTIPLES:
        return any(is_sum(child) for child, _ in inputs(node))
    reduction = reduction_of(node)
    return reduction is not None and reduction.divisor is None


def added(node: Node) -> list[Node]:
    """Return what a node adds up: the node alone if it is no addition."""
    waiting = [node]
    found = []
    while waiting:
        node = waiting.pop()
        if node.name() in ADDITIONS:
            waiting += [child for child, _ in inputs(node)]
        else:
            found.append(node)
    return found


def num_terms(loss: Tensor) -> int:
    """Return how many losses a divided one is the sum of: 2 for (a + b) / 2."""
    return len(added(loss.grad_fn.next_functions[0][0]))


def backward_after_step() -> ConfigError:
    """Return the error for a backward after an optimizer step in the same window."""
    return ConfigError(
        "accelerator.backward came after the optimizer's step in the same window, so its forward "
        "used other weights than those of the window's other micro-batches: run all backwards of a "
        "micro-batch before optimizer.step(). Models that train in turn (a discriminator, then a "
        "generator) need windows of one micro-batch on one process, or loops of their own."
    )


def clipped_between() -> ConfigError:
    """Return the error for a change of gradients between two backwards of a micro-batch."""
    return ConfigError(
        "gradients changed between two calls of accelerator.backward in one micro-batch (clipping, "
        "zero_grad, loss.backward()), but the window's gradient is the sum of all its backwards: "
        "change it after the last one."
    )


def clipped_early() -> ConfigError:
    """Return the error for a change of gradients before those of a window are complete."""
    return ConfigError(
        "this micro-batch had fewer calls of accelerator.backward than one before it, so the "
        "window's gradient appears with accelerator.clip_grad_norm_ or optimizer.step(), but it "
        "was changed before (torch.nn.utils.clip_grad_norm_, loss.backward()): clip with "
        "accelerator.clip_grad_norm_, or call accelerator.backward as often for each micro-batch, "
        "with outputs.sum() * 0 for a loss that none of its samples has."
    )


def backward_after_zero_grad() -> ConfigError:
    """Return the error for a zero_grad between two backwards of a micro-batch."""
    return ConfigError(
        "optimizer.zero_grad() came between two calls of accelerator.backward in one micro-batch, "
        "after the first one reached the optimizer's parameters: it would drop the first loss for "
        "them, but gradients are summed until the window's end. Let the first loss not reach them "
        "(detach), or train the models in loops of their own."
    )


def random_collate_by_hand(num_parts: int) -> UnkeyedRandomness:
    """Return the error for a loop that accumulates by hand, and whose collate function draws."""
    return UnkeyedRandomness(
        "the collate function draws random numbers. The loader of a loop that accumulates by hand "
        "knows no window, so each micro-batch draws its own, and they depend on the split: pass "
        f"gradient_accumulation_steps={num_parts} to Accelerator, put the loop's body into `with "
        "accelerator.accumulate(model):`, and leave the division out; or draw in the dataset."
    )


def late_parameters() -> ConfigError:
    """Return the error for parameters that were switched on within a window."""
    return ConfigError(
        "requires_grad of a parameter was set to True after the batch was fetched: its gradient "
        "is not among those that the window sums up. Set requires_grad before the batch is "
        "fetched, at the end of the iteration before."
    )


def not_fetched() -> ConfigError:
    """Return the error for a batch that is fetched while the one before waits for its backward."""
    return ConfigError(
        "a batch was fetched before accelerator.backward of the one before it. In an evaluation, "
        "call model.eval() before the loop. In training, call accelerator.backward(loss) for each "
        "batch, not loss.backward(). If the loop collects several batches to count their targets "
        "(num_items_in_batch), leave that out: with gradient_accumulation_steps and `with "
        "accelerator.accumulate(model):` around the loop's body, pass the mean loss of each batch; "
        "the window is divided by its number of targets on all processes."
    )


def unexpected_backward(*, is_in_evaluation: bool) -> ConfigError:
    """Return the error for a backward without a micro-batch.

    Args:
        is_in_evaluation: Whether no model was in training mode when the loop over it began.
    """
    if is_in_evaluation:
        return ConfigError(
            "accelerator.backward needs a batch of a training window, but the model was in "
            "evaluation mode when the loader began (from_pretrained returns it so): call "
            "model.train() before the training loop. To train without dropout, set its "
            "probabilities to 0."
        )
    return ConfigError(
        "accelerator.backward needs a batch of a prepared DataLoader that was not used yet: pass "
        "the training DataLoader itself to accelerator.prepare, not a generator around it (put "
        "cycle() around the prepared one), and keep the iterator: `iterator = iter(loader)`, not "
        "next(iter(loader)). A loop over tensors of its own (rollouts) can prepare "
        "DataLoader(torch.arange(number), batch_size), and index them with its batches."
    )


def check_undivided(loss: Tensor, num_steps: int) -> None:
    """Check that a planned loop does not divide its loss by the accumulation steps.

    (a + b) / 2 with 2 steps is taken for the mean of two terms, and so are more terms.

    Raises:
        ConfigError: If it does.
    """
    if num_steps < 2 or division_by_number(loss) != num_steps:
        return
    number = num_terms(loss)
    if number > 1 and num_steps in (2, number):
        return
    raise ConfigError(
        f"the loss is divided by {num_steps}, the gradient accumulation steps, but the window's "
        "gradient is that of the mean loss already: leave the division out. If it is meant, "
        f"multiply the loss by {1 / num_steps:.6g}."
    )


def multiplied_by_steps(num_steps: int) -> ConfigError:
    """Return the error for a planned loop that multiplies its loss by the accumulation steps."""
    return ConfigError(
        f"the loss is multiplied by {num_steps}, the gradient accumulation steps, but nothing "
        "divides the window's mean loss by them: leave the factor out. If it is meant, divide the "
        f"loss by {1 / num_steps:.6g}."
    )


def numeric_options(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the options of each parameter group that are numbers, such as the learning rate."""
    found = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        values = {k: v.item() if _is_scalar(v) else v for k, v in group.items() if k != "params"}
        found.append({k: v for k, v in values.items() if isinstance(v, Real | tuple)})
    return found


def _is_scalar(value: Any) -> bool:
    """Whether an option of an optimizer is a tensor of one number."""
    return isinstance(value, Tensor) and value.numel() == 1


def check_same_options(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Check that no schedule stepped within a window.

    Args:
        before: The `numeric_options` of all optimizers at the window's first backward.
        now: Those at another one.

    Raises:
        ConfigError: If one is different.
    """
    for group_before, group in zip(before, now, strict=False):
        for name in group_before.keys() & group.keys():
            if group_before[name] != group[name]:
                raise ConfigError(
                    f"{name} of the optimizer changed from {group_before[name]} to {group[name]} "
                    "within a window: a schedule that steps with every micro-batch makes the "
                    "update depend on their number. Pass the scheduler to accelerator.prepare, or "
                    "step it only if accelerator.sync_gradients."
                )


def check_no_foreign_gradients(
    parameters: Sequence[nn.Parameter], earlier: Sequence[Tensor | None]
) -> None:
    """Check that no gradient appeared within a window but by `accelerator.backward`.

    Args:
        parameters: The trained parameters.
        earlier: Their gradients when the window began.

    Raises:
        ConfigError: If one did.
    """
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if parameter.grad is not None and parameter.grad is not gradient:
            raise ConfigError(
                "gradients appeared within a window without accelerator.backward (loss.backward() "
                "bypasses the accelerator, and an optimizer in backward hooks steps too early): "
                f"{ACCUMULATE_REMEDY}."
            )


def check_no_earlier_gradients(
    optimizers: Sequence[torch.optim.Optimizer], shown: Sequence[Tensor | None]
) -> None:
    """Check, at the end of a window, that the gradients of the window before were zeroed.

    Args:
        optimizers: Prepared optimizers.
        shown: Gradients that were there when the window began.

    Raises:
        ConfigError: If an optimizer would have used them once more.
    """
    earlier = {id(gradient) for gradient in shown if gradient is not None}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_left = parameter.grad is not None and id(parameter.grad) in earlier
                if is_left and bool(parameter.grad.any()):
                    raise ConfigError(
                        "gradients of an earlier window are left: its optimizer.step() or "
                        "zero_grad() was not called. Call both in each iteration, or below "
                        f"`if accelerator.sync_gradients:`; {ACCUMULATE_REMEDY}."
                    )


def has_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether a parameter of some optimizers has a gradient that is not 0."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    return any(p.grad is not None and bool(p.grad.any()) for p in parameters)


def early_step() -> ConfigError:
    """Return the error for an optimizer step before the window's gradient is complete."""
    return ConfigError(
        "optimizer.step() came before accelerator.backward of every micro-batch of the window. "
        "Call accelerator.backward(loss), not loss.backward(), and pass the DataLoader to "
        f"accelerator.prepare. If the loop accumulates: {ACCUMULATE_REMEDY}."
    )
