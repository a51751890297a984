"""Functions in processes of their own, so that each has a peak of memory, a thread pool and an Accelerate state of its own."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from unittest.mock import patch

from transformers.utils import logging

from hf_ga.start import environment

# Imported once by the process that all others are forked of: so they start within a second, from the same memory.
_PRELOADED = ["hf_ga.benchmark.sections", "trl.trainer.sft_trainer"]


class ProcessEnded(Exception):
    """The process ended without an answer (out of memory?)."""


def run_apart(function: Callable, *arguments: Any, as_finetune: bool = False) -> Any:
    """What the function returns, computed in a process of its own. Function, arguments and result must be picklable.

    Args:
        as_finetune: with the settings with which `finetune.py` starts itself again; then it is not forked, but imports all anew.

    Raises:
        ProcessEnded: it ended without an answer. Whatever the function raises.
    """
    added = environment() if as_finetune else {}
    context = multiprocessing.get_context("spawn" if added else "forkserver")
    if not added:
        context.set_forkserver_preload(_PRELOADED)
    with patch.dict(os.environ, added), ProcessPoolExecutor(1, mp_context=context, initializer=_be_quiet) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise ProcessEnded(f"{function.__name__} ended without an answer: was memory short?") from error


def _be_quiet() -> None:
    """Figures are the only output; what others warn of (TRL of padding-free attention, for one) is told in the documentation."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
