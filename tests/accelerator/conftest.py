"""Nothing of a loop is left behind, also where it ended with an error."""

import gc

import pytest
import torch.nn.functional as F
from transformers.activations import NewGELUActivation


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = F.cross_entropy, F.dropout, NewGELUActivation.forward
    yield
    if (F.cross_entropy, F.dropout, NewGELUActivation.forward) != before:
        gc.collect()  # the loop that an error ended is kept by its traceback
    assert (F.cross_entropy, F.dropout, NewGELUActivation.forward) == before
