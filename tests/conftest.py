"""Set before anything else is imported: no network, one thread (the models are tiny, and threads would wait for each other)."""

import os

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
    os.environ[name] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="many more random examples, which take minutes")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers whichever ran before it."""
    torch.manual_seed(0)
