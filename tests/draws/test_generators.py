"""Whether code drew from a global random generator."""

import random

import numpy as np
import pytest
import torch

from hf_ga.draws.generators import moved_generators, preserved_random_states, random_states

DRAWS = {
    "torch": lambda: torch.rand(1),
    "numpy": np.random.random_sample,
    "numpy, as many numbers as its state has": lambda: np.random.random_sample(624 // 2),
    "random": random.random,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_found(name):
    with preserved_random_states():
        before = random_states(random_states())
        assert moved_generators(before) == []
        DRAWS[name]()
        assert moved_generators(before) == [name.split(",")[0]]


def test_a_normal_number_that_numpy_has_kept_is_found():
    """numpy draws two at a time, so that every second draw leaves the words of its state alone."""
    with preserved_random_states():
        np.random.seed(0)
        before = random_states()
        for _ in range(4):
            np.random.standard_normal()
            assert moved_generators(before) == ["numpy"]
            before = random_states(before)
            assert moved_generators(before) == []


def test_another_generator_of_numpy_is_read():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        before = random_states()
        assert moved_generators(before) == []
        np.random.random_sample()
        assert moved_generators(before) == ["numpy"]
    finally:
        np.random.set_bit_generator(usual)
