"""Replacements of torch's random functions except dropout: their numbers belong to samples.

A replacement takes the `KeyedDraws` that derives numbers from the keys of the samples and the
original function, then the original's arguments. It raises `NotKeyed` if the numbers cannot be tied
to samples. Where an original is called with an empty tensor, it only checks the arguments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from hf_ga.draws import samplers
from hf_ga.draws.draw import Draw
from hf_ga.draws.refusal import NotKeyed

if TYPE_CHECKING:
    from hf_ga.draws.keyed import KeyedDraws


def factory(
    sampler: Callable,
    draws: "KeyedDraws",
    original: Callable,
    *size: Any,
    generator: Generator | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """Replacement of `torch.rand` and `torch.randn`.

    Args:
        sampler: Draws the numbers, from `samplers`.
        draws: The keys of the samples.
        original: The torch function.
        *size: As in `torch.rand`, like the other arguments.
    """
    result = torch.empty(*size, **options)
    original(0, dtype=result.dtype, device="cpu")
    return fill(draws, original, result, sampler, generator, requires_grad)


def like(
    sampler: Callable,
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    *,
    generator: Generator | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """Replacement of `torch.rand_like` and `torch.randn_like`, with a sampler as in `factory`."""
    result = torch.empty_like(input, **options)
    original(_empty(result))
    is_of_weights = isinstance(input, Parameter)
    return fill(
        draws, original, result, sampler, generator, requires_grad, is_of_weights=is_of_weights
    )


def randint(
    draws: "KeyedDraws",
    original: Callable,
    *args: Any,
    size: Any = None,
    generator: Generator | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """Replacement of `torch.randint(high, size)` and `torch.randint(low, high, size)`."""
    if size is None:
        *args, size = args
    low, high = _bounds(args, options)
    if "out" not in options:
        options.setdefault("dtype", torch.int64)
    result = torch.empty(size, **options)
    original(low, high, (0,), dtype=result.dtype, device="cpu")
    sampler = partial(samplers.integers, low=low, high=high)
    return fill(draws, original, result, sampler, generator, requires_grad)


def randint_like(
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    *args: Any,
    generator: Generator | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """Replacement of `torch.randint_like`: (input, high) or (input, low, high)."""
    low, high = _bounds(args, options)
    result = torch.empty_like(input, **options)
    original(_empty(result), low, high)
    sampler = partial(samplers.integers, low=low, high=high)
    return fill(draws, original, result, sampler, generator, requires_grad)


def in_place(
    sampler: Callable,
    draws: "KeyedDraws",
    original: Callable,
    self: Tensor,
    *args: Any,
    generator: Generator | None = None,
    **kwargs: Any,
) -> Tensor:
    """Replacement of methods like `Tensor.normal_`.

    Args:
        sampler: Draws the numbers, from `samplers`; has the parameters of the method.
        draws: The keys of the samples.
        original: The method of `torch.Tensor`.
        self: The tensor that is filled.
        *args: As in the method, like the other arguments.
    """
    if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        with draws.suspended():  # under a TorchFunctionMode, torch calls the replacement again
            original(_empty(self), *args, **kwargs)
    names = {"from": "low", "to": "high"}
    parameters = {names.get(name, name): value for name, value in kwargs.items()}

    def sampler_of_call(draw: Draw, dtype: torch.dtype) -> Tensor:
        """Draw the numbers with the parameters of this call."""
        return sampler(draw, dtype, *args, **parameters)

    return fill(draws, original, self, sampler_of_call, generator)


def random_(
    draws: "KeyedDraws",
    original: Callable,
    self: Tensor,
    *args: Any,
    generator: Generator | None = None,
    **kwargs: Any,
) -> Tensor:
    """Replacement of `Tensor.random_()`, `random_(to)` and `random_(from, to)`."""
    if len(args) == 1 and not kwargs:
        args = (0, *args)
    return in_place(samplers.integers, draws, original, self, *args, generator=generator, **kwargs)


def bernoulli(
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    p: float | None = None,
    *,
    generator: Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Replacement of `torch.bernoulli` and `Tensor.bernoulli`: of the probabilities `input`, or of
    `p` in the shape of `input`.
    """
    _refuse_out(original, input.shape, out)
    arguments = () if p is None else (p,)
    with draws.suspended():  # as in `in_place`
        original(_empty(input), *arguments)
    sampler = partial(samplers.bernoulli, p=input if p is None else p)
    return fill(draws, original, input.clone(), sampler, generator)


def normal(
    draws: "KeyedDraws",
    original: Callable,
    mean: Tensor | float,
    std: Tensor | float = 1.0,
    size: Any = None,
    *,
    generator: Generator | None = None,
    requires_grad: bool = False,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Replacement of `torch.normal`. As there, the gradient of tensors `mean` and `std` is 0."""
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        sampler = partial(samplers.normal, mean=mean, std=std)
        result = torch.empty(size, out=out, **options)
        original(mean, std, (0,), dtype=result.dtype, device="cpu")
        return fill(draws, original, result, sampler, generator, requires_grad)
    result = sum(tensors).to(tensors[0].dtype, copy=True)
    _refuse_out(original, result.shape, out)
    draw = draws.draw("normal", result.shape, result.device, generator)
    with torch.no_grad():
        numbers = samplers.normal(draw, result.dtype) * std + mean
    return result.copy_(numbers)


def randperm(
    draws: "KeyedDraws",
    original: Callable,
    n: int,
    *,
    generator: Generator | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """Replacement of `torch.randperm`: one permutation per window.

    Raises:
        NotKeyed: If it permutes the samples, or several rows of each.
    """
    if "out" not in options:
        options.setdefault("dtype", torch.int64)
    result = torch.empty(n, **options)
    original(0, dtype=result.dtype, device="cpu")
    draw = draws.draw("randperm", result.shape, result.device, generator, only_shared=True)
    num_samples = draws.num_samples
    if n == num_samples or (num_samples > 1 and n > 0 and n % num_samples == 0):
        reason = f"it permutes the {num_samples} samples of the micro-batch among themselves"
        raise NotKeyed("randperm", result.shape, reason)
    result.copy_(draw.integers(0, 1 << 63).argsort())
    return result.requires_grad_() if requires_grad else result


def multinomial(
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Replacement of `torch.multinomial` and `Tensor.multinomial`.

    Raises:
        NotKeyed: If it draws without replacement from one distribution.
    """
    shape = torch.Size((*input.shape[:-1], num_samples))
    _refuse_out(original, shape, out)
    weights = input.detach()
    sums = weights.double().cumsum(-1).contiguous()
    totals = sums[..., -1:]
    is_valid = (weights >= 0).all() & totals.isfinite().all() & (totals > 0).all()
    torch._assert_async(is_valid, "multinomial: a probability is inf, nan or < 0, or all are 0")
    if replacement:
        draw = draws.draw("multinomial", shape, input.device, generator)
        points = draw.uniform(torch.float64) * totals
        return torch.searchsorted(sums, points.contiguous(), right=True)
    batch_dims = input.dim() - 1
    draw = draws.draw("multinomial", input.shape, input.device, generator, batch_dims=batch_dims)
    if batch_dims == 0:
        reason = "numbers without replacement exclude each other, so they cannot be one per sample"
        raise NotKeyed("multinomial", shape, reason)
    # The order of w / e with e of an exponential distribution is that of draws without replacement.
    ranks = weights / draw.exponential(weights.dtype)
    return ranks.topk(num_samples).indices


def by_sample(
    num_event_dims: int,
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    generator: Generator | None = None,
) -> Tensor:
    """Replacement of rare functions of one tensor, such as `torch.poisson`.

    Args:
        num_event_dims: Trailing dims that are drawn together.
        draws: The keys of the samples.
        original: The torch function.
        input: As in the original, like the other argument.
    """
    return _call_by_sample(draws, original, [input], num_event_dims, generator)


def binomial(
    draws: "KeyedDraws",
    original: Callable,
    count: Tensor,
    prob: Tensor,
    generator: Generator | None = None,
) -> Tensor:
    """Replacement of `torch.binomial`."""
    return _call_by_sample(draws, original, torch.broadcast_tensors(count, prob), 0, generator)


def _call_by_sample(
    draws: "KeyedDraws",
    original: Callable,
    parameters: Sequence[Tensor],
    num_event_dims: int,
    generator: Generator | None,
) -> Tensor:
    """Call a random function for each sample, with a generator that the sample's key seeds. Its
    arguments have the same shape, whose last dims (`num_event_dims`) are drawn together.
    """
    shape = parameters[0].shape
    device = parameters[0].device
    name = original.__name__.removeprefix("_")
    batch_dims = len(shape) - num_event_dims
    draw = draws.draw(name, shape, device, generator, batch_dims=batch_dims)
    seeds = draw.seeds()
    if draw.sample_dim is None:
        return original(*parameters, generator=Generator(device).manual_seed(seeds[0]))
    parts = [tensor.split(draw.rows_per_sample, draw.sample_dim) for tensor in parameters]
    numbers = [
        original(*rows, generator=Generator(device).manual_seed(seed))
        for *rows, seed in zip(*parts, seeds, strict=True)
    ]
    return torch.cat(numbers, draw.sample_dim)


def fill(
    draws: "KeyedDraws",
    original: Callable,
    result: Tensor,
    sampler: Callable,
    generator: Generator | None,
    requires_grad: bool = False,
    *,
    is_of_weights: bool = False,
) -> Tensor:
    """Fill a tensor in place with the numbers of a draw, and return it.

    Args:
        draws: The keys of the samples.
        original: The random function that is replaced.
        result: The tensor.
        sampler: (draw, dtype) -> numbers of any dtype.
        generator: The user's generator. It only makes the numbers others.
        requires_grad: Whether the result is a leaf that requires a gradient.
        is_of_weights: Whether the numbers are for a parameter, so that no dim holds samples.
    """
    draw = draws.draw(
        original.__name__, result.shape, result.device, generator, only_shared=is_of_weights
    )
    result.copy_(sampler(draw, result.dtype))
    return result.requires_grad_() if requires_grad else result


def _empty(tensor: Tensor) -> Tensor:
    """Return a tensor without elements, of the dtype of another one, on the CPU."""
    return torch.empty(0, dtype=tensor.dtype, device="cpu")


def _bounds(positional: tuple, named: dict[str, Any]) -> tuple[int, int]:
    """Return low and high of a call of `torch.randint`, and take them from its named arguments."""
    bounds = [*positional, *[named.pop(name) for name in ("low", "high") if name in named]]
    if len(bounds) not in (1, 2):
        raise TypeError(f"expected (high, size) or (low, high, size), got the bounds {bounds}")
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return int(low), int(high)


def _refuse_out(original: Callable, shape: torch.Size, out: Tensor | None) -> None:
    """Raise NotKeyed if a call has the argument `out`."""
    if out is not None:
        raise NotKeyed(original.__name__, shape, "with out= it cannot be tied to samples")
