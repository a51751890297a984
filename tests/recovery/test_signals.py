"""Signals: a run that is asked to stop saves itself, says so, and is the undisturbed run when it
goes on.
"""

import multiprocessing
import os
import signal
import subprocess
import threading

import pytest
from forked import on_two_ranks
from runs import lines_of, relative_distance, small_config, train, write_rows
from stops import without_speed

import hf_ga
from hf_ga.errors import RunStopped
from hf_ga.finetuning.run import loop
from hf_ga.finetuning.run.flags import cli
from hf_ga.loading import workers
from hf_ga.order.order import epoch_order
from hf_ga.recovery import signals
from hf_ga.recovery.signals import stop_requests
from hf_ga.run import STOPPED


@pytest.fixture(autouse=True)
def sigint_is_taken():
    """Also where the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def at_once(monkeypatch):
    """Signals of one kind are two requests however close they are."""
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", -1.0)


def signalled(patch, where, call, *numbers):
    """Signals come into the given call of a function of the loop, before it does its work."""
    calls = []
    function = getattr(loop, where)

    def interrupted(*args, **kwargs):
        calls.append(where)
        if len(calls) == call:
            for number in numbers:
                signal.raise_signal(number)
        return function(*args, **kwargs)

    patch.setattr(loop, where, interrupted)


def handlers():
    return [signal.getsignal(getattr(signal, name)) for name in signals.STOP_SIGNALS]


# -- handlers
# ---------------------------------------------------------------------------------------------------------------


def test_signals_are_remembered_and_handlers_come_back():
    before = handlers()
    with stop_requests() as request:
        assert not request.received
        for name in ("SIGUSR2", "SIGTERM", "SIGINT", "SIGUSR1", "SIGTERM"):
            signal.raise_signal(getattr(signal, name))
            assert request.received
            assert str(request) == "SIGUSR2"
    assert handlers() == before


def test_the_same_signal_again_acts_as_before(monkeypatch):
    """Within a second it is one request. Of another kind it is not: SLURM warns before it
    terminates.
    """
    before = handlers()
    clock = [10.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    with pytest.raises(KeyboardInterrupt), stop_requests() as request:
        for clock[0] in (10.0, 10.2, 11.0):
            signal.raise_signal(signal.SIGINT)
        clock[0] = 30.0
        signal.raise_signal(signal.SIGTERM)
        assert request.first_arrival == {signal.SIGINT: 10.0, signal.SIGTERM: 30.0}
        signal.raise_signal(signal.SIGINT)
    assert handlers() == before


def test_the_second_sigterm_ends_the_process(at_once):
    child = os.fork()
    if not child:
        try:
            with stop_requests():
                signal.raise_signal(signal.SIGTERM)
        finally:
            os._exit(0)  # reached only where it did not
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_what_the_parent_ignores_stays_ignored(monkeypatch):
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with stop_requests() as request:
            signal.raise_signal(signal.SIGUSR2)
            assert not request.received
            assert signal.getsignal(signal.SIGUSR1) not in (
                signal.SIG_DFL,
                signal.SIG_IGN,
            )
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_in_another_thread_nothing_changes():
    found = []

    def work():
        with stop_requests() as request:
            found.extend([request.received, *handlers()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, *handlers()]


# -- runs of one process
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "call", "name", "step"),
    [
        ("_evaluate", 1, "SIGUSR1", 4),  # finished first, as is the next window
        # Behind the last window: what follows it is left to the resumed run.
        ("save", 3, "SIGINT", 8),
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    where, call, name, step, place, undisturbed, tmp_path
):
    """Weights, metrics.jsonl, best model and summary. Dropout is on; checkpoints are due at 3, 6
    and 8.
    """
    out = tmp_path / "out"
    before = handlers()
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, where, call, getattr(signal, name))
        with pytest.raises(RunStopped) as stopped:
            train(place, out)
    assert handlers() == before
    said = (
        f"stopped by {name} after step {step}: saved as {out / f'checkpoint-{step}'}; resume with "
        "--resume_from_checkpoint auto"
    )
    assert str(stopped.value) == said
    assert [line["step"] for line in lines_of(out)] == list(range(1, step + 1))
    assert not (out / "summary.json").exists()
    assert without_speed(out) == without_speed(undisturbed[1])[:step]
    summary = train(place, out, resume_from_checkpoint="auto")
    same = ("weights_sha256", "eval_loss", "best_eval_loss", "train_loss", "steps")
    assert {k: summary[k] for k in same} == {k: undisturbed[0][k] for k in same}
    assert without_speed(out) == without_speed(undisturbed[1])
    assert relative_distance(out / "best", undisturbed[1] / "best") == 0


@pytest.mark.slow("a whole run")
def test_stopped_while_windows_make_no_step(place, tmp_path):
    """At step 0, where there is nothing yet to save but the place in the order."""
    settings = {
        "dataset_name": rows_without_targets(place),
        "global_batch_size": 2,
        "max_steps": 3,
        "eval_steps": 3,
    }
    whole = train(place, tmp_path / "whole", **settings)
    assert whole["skipped_windows"] > 3
    for more in ({}, {"resume_from_checkpoint": "auto"}):
        with pytest.MonkeyPatch.context() as patch:
            signalled(patch, "train_step", 2, signal.SIGTERM)
            with pytest.raises(RunStopped, match="after step 0: "):
                train(place, tmp_path / "out", **settings, **more)
    resumed = train(place, tmp_path / "out", **settings, resume_from_checkpoint="auto")
    same = ("weights_sha256", "skipped_windows", "steps")
    assert {k: resumed[k] for k in same} == {k: whole[k] for k in same}
    assert without_speed(tmp_path / "out") == without_speed(tmp_path / "whole")


def rows_without_targets(place):
    """The order of seed 7 begins with some of them."""
    first = set(epoch_order(60, 7, 0)[:10].tolist())
    return write_rows(
        place / "few targets.jsonl",
        [{"text": "<eos>" if i in first else "the window of samples"} for i in range(60)],
    )


def test_a_signal_behind_the_last_exchange_is_not_lost(place, tmp_path, monkeypatch):
    leave = loop._raise_if_stopped
    monkeypatch.setattr(
        loop, "_raise_if_stopped", lambda *args: (leave(*args), signal.raise_signal(signal.SIGINT))
    )
    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path / "out")


def test_the_command_says_so_in_one_line_and_exits_with_75(place, tmp_path, monkeypatch, capsys):
    signalled(monkeypatch, "train_step", 2, signal.SIGTERM)
    flags = [
        f"--{name}={value}"
        for name, value in small_config(place, tmp_path / "out").to_dict().items()
        if value is not None
    ]
    assert (
        cli.finetune_main([flag for flag in flags if not flag.endswith("=False")]) == STOPPED == 75
    )
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "stopped" in line or "error" in line] == [
        f"stopped by SIGTERM after step 2: saved as {tmp_path / 'out' / 'checkpoint-2'}; resume "
        "with --resume_from_checkpoint auto"
    ]


@pytest.mark.parametrize("init", [workers.obey_parent_only, None], ids=["with", "without"])
def test_a_signal_to_all_processes_of_a_job_leaves_its_workers_alive(
    init, place, tmp_path, monkeypatch
):
    """Those that prefetch, while a checkpoint is written: the run takes one more window from them.
    Control: as torch has it.
    """
    monkeypatch.setattr(workers, "obey_parent_only", init)
    alive = []
    save = loop.save
    others = multiprocessing.active_children()

    def signalled_save(*args):
        if not alive:
            (worker,) = (
                child for child in multiprocessing.active_children() if child not in others
            )
            subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # not by its parent
            worker.join(1.0 if init else 20.0)
            alive.append(worker.is_alive())
            signal.raise_signal(signal.SIGTERM)
        save(*args)

    monkeypatch.setattr(loop, "save", signalled_save)
    # Without, torch raises where the worker is waited for, or wherever its end is noticed.
    with pytest.raises(
        RunStopped if init else (hf_ga.DataError, RuntimeError),
        match="after step 4: saved" if init else "worker",
    ):
        train(place, tmp_path / "out", dataloader_num_workers=1)
    assert (alive == [True]) == (init is not None) and not set(
        multiprocessing.active_children()
    ) - set(others), "the parent's own end of them works"


# -- several processes
# ------------------------------------------------------------------------------------------------------


@pytest.mark.slow("a whole run")
def test_two_processes_stop_in_the_same_window(place, undisturbed, tmp_path, monkeypatch):
    """Only one gets the signal; the resumed run is the undisturbed one."""

    def stopped():
        if os.environ["RANK"] == "1":
            signalled(monkeypatch, "train_step", 5, signal.SIGTERM)
        hf_ga.finetune(small_config(place, tmp_path / "out"))

    first, second = on_two_ranks(stopped)
    assert first.startswith(
        "RunStopped: stopped by a signal to another process after step 5: saved as "
    )
    assert second.startswith("RunStopped: stopped by SIGTERM after step 5: saved as ")
    train(place, tmp_path / "out", resume_from_checkpoint="auto")  # on one process
    assert [line["step"] for line in lines_of(tmp_path / "out")] == list(range(1, 9))
    assert relative_distance(tmp_path / "out", undisturbed[1]) <= 5e-5
