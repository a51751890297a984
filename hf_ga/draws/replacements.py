"""The table of torch's random functions with their replacements."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_ga.draws import functions, samplers
from hf_ga.draws.dropout import dropout_variants as variants
from hf_ga.draws.dropout.dropout_functions import FUNCTIONAL, torch_dropout

# (owner of a torch function, its name, its replacement)
Replacement = tuple[object, str, Callable]

FACTORIES: list[Replacement] = [
    (torch, "rand", partial(functions.factory, samplers.uniform)),
    (torch, "randn", partial(functions.factory, samplers.normal)),
    (torch, "rand_like", partial(functions.like, samplers.uniform)),
    (torch, "randn_like", partial(functions.like, samplers.normal)),
    (torch, "randint", functions.randint),
    (torch, "randint_like", functions.randint_like),
    (torch, "randperm", functions.randperm),
    (torch, "normal", functions.normal),
]

OF_PARAMETERS: list[Replacement] = [
    (torch, "bernoulli", functions.bernoulli),
    (Tensor, "bernoulli", functions.bernoulli),
    (torch, "multinomial", functions.multinomial),
    (Tensor, "multinomial", functions.multinomial),
    (torch, "poisson", partial(functions.by_sample, 0)),
    (torch, "binomial", functions.binomial),
    (torch, "_standard_gamma", partial(functions.by_sample, 0)),
    (torch, "_sample_dirichlet", partial(functions.by_sample, 1)),
]

IN_PLACE: list[Replacement] = [
    (Tensor, "uniform_", partial(functions.in_place, samplers.uniform)),
    (Tensor, "normal_", partial(functions.in_place, samplers.normal)),
    (Tensor, "bernoulli_", partial(functions.in_place, samplers.bernoulli)),
    (Tensor, "exponential_", partial(functions.in_place, samplers.exponential)),
    (Tensor, "geometric_", partial(functions.in_place, samplers.geometric)),
    (Tensor, "log_normal_", partial(functions.in_place, samplers.log_normal)),
    (Tensor, "cauchy_", partial(functions.in_place, samplers.cauchy)),
    (Tensor, "random_", functions.random_),
]

# `torch.nn.functional` calls them through `torch._VF`, also where user code has imported a function
# such as `F.dropout` before it was replaced.
OF_FUNCTIONAL: list[Replacement] = [
    (owner, name, replacement)
    for owner in (torch, torch._VF)
    for name, replacement in [
        ("dropout", torch_dropout),
        ("dropout_", partial(variants.dropout, None)),
        ("feature_dropout", partial(variants.dropout, 2)),
        ("feature_dropout_", partial(variants.dropout, 2)),
        ("alpha_dropout", partial(variants.alpha_dropout, None)),
        ("alpha_dropout_", partial(variants.alpha_dropout, None)),
        ("feature_alpha_dropout", partial(variants.alpha_dropout, 2)),
        ("feature_alpha_dropout_", partial(variants.alpha_dropout, 2)),
        ("rrelu", variants.rrelu),
        ("rrelu_", variants.rrelu),
    ]
]

REPLACEMENTS = [*FACTORIES, *OF_PARAMETERS, *IN_PLACE, *OF_FUNCTIONAL, *FUNCTIONAL]
