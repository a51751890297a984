"""Functions in processes of their own, so that each has a peak of memory, a thread pool and an Accelerate state of its own."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from transformers.utils import logging

# Imported once by the process that all others are forked of: so they start within a second, from the same memory.
_PRELOADED = ["benchmark.sections", "trl.trainer.sft_trainer"]
_SECONDS_BETWEEN_LOOKS = 0.05  # whether a process that asks for no turn has ended


class ProcessEnded(Exception):
    """The process ended without an answer (out of memory?)."""


def run_apart(function: Callable, *arguments: Any) -> Any:
    """What the function returns, computed in a process of its own. Function, arguments and result must be picklable.

    Raises:
        ProcessEnded: it ended without an answer. Whatever the function raises.
    """
    with _started(function, *arguments) as future:
        return _result(function, future)


def run_in_turns(function: Callable, calls: Sequence[Sequence[Any]]) -> list[Any | ProcessEnded]:
    """What `function(*call, turn)` returns for each call, all in processes of their own that live at the same time, one at work.

    Where a function calls `wait_for_turn(turn)`, it waits until all others have had their turns: so a machine whose speed changes
    changes it for all of them. What comes before the first one is done one process after the other.

    Returns:
        one result a call; `ProcessEnded` in place of one that ended without an answer.
    """
    with ExitStack() as stack:
        started: list[tuple[Future, Connection]] = []
        for call in calls:
            ours, turn = multiprocessing.Pipe()
            future = stack.enter_context(_started(function, *call, turn))
            for end in (turn, ours):  # closed before the pool is waited for: after an error here, no process waits for its turn
                stack.enter_context(end)
            started.append((future, ours))
            _until_it_waits(future, ours)
        waiting = started
        while waiting := [(future, ours) for future, ours in waiting if not future.done()]:
            for future, ours in waiting:
                ours.send(None)
                _until_it_waits(future, ours)
        return [_result_or_end(function, future) for future, _ in started]


def wait_for_turn(turn: Connection) -> None:
    """For a function that runs in turns: its turn is over, if it had one; returns when the next one begins."""
    turn.send(None)
    turn.recv()


def _until_it_waits(future: Future, ours: Connection) -> None:
    """Returns when the process waits for its turn, or has ended."""
    while not future.done():
        if ours.poll(_SECONDS_BETWEEN_LOOKS):
            ours.recv()
            return


@contextmanager
def _started(function: Callable, *arguments: Any) -> Iterator[Future]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context, initializer=_be_quiet) as pool:
        yield pool.submit(function, *arguments)


def _result(function: Callable, future: Future) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise ProcessEnded(f"{function.__name__} ended without an answer: was memory short?") from error


def _result_or_end(function: Callable, future: Future) -> Any | ProcessEnded:
    try:
        return _result(function, future)
    except ProcessEnded as end:
        return end


def _be_quiet() -> None:
    """Figures are the only output; what others warn of (TRL of padding-free attention, for one) is told in the documentation."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
