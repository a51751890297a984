"""The promises in the environment that users have: threads, allocator and variables as a fresh shell leaves them."""

import json
import os

import pytest
from fresh_shell import run_python

TRAINER = """
import json, tempfile, torch
from trainers import arguments, trained, weight_error
from helpers import gpt2, pad_right, token_samples
from hf_ga import ExactTrainer
samples, folder = token_samples({samples}), tempfile.mkdtemp()
runs = [
    trained(ExactTrainer, gpt2(0.1), arguments(folder, layout), samples, data_collator=pad_right) for layout in [(4, 4), (16, 1)]
]
print(json.dumps([torch.get_num_threads(), weight_error(*runs)]))
"""


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("samples", [48, 90])
def test_exact_trainer_with_all_threads(samples):
    """ExactTrainer once planned micro-batches for two threads where Trainer takes `gradient_accumulation_steps` of them."""
    num_threads, error = json.loads(run_python(TRAINER.format(samples=samples)).splitlines()[-1])
    assert num_threads == len(os.sched_getaffinity(0))
    assert error < 1e-6
