"""What a GPU's host has to do in a window, counted on small models."""

import argparse

import count_rows
import pytest
from documented_loop import reset_states

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads `.grad`
FLAGS = argparse.Namespace(layers=2, width=16, longest=32, windows=6, backend="eager")


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


@pytest.mark.slow("traces the layers in many shapes")
def test_rows_are_fewer_and_their_graphs_few():
    padded = count_rows.count(FLAGS, compiled=True, with_rows=False)
    rows = count_rows.count(FLAGS, compiled=True, with_rows=True)
    assert sum(rows.num_micro_batches[3:]) < sum(padded.num_micro_batches[3:])
    needed = zip(rows.num_micro_batches, rows.num_needed, strict=True)
    assert all(number >= few for number, few in needed)
    assert 0 < rows.num_graphs[-1] <= 3 < padded.num_graphs[-1]
    assert rows.num_graphs[4] == rows.num_graphs[-1]
    assert rows.num_in_attention > 0 == padded.num_in_attention
    assert rows.num_operators < padded.num_operators
