"""One run with random events, compared with the undisturbed one."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import flat
from safetensors.torch import load_file

from elastic.inputs import NUM_SAMPLES, SAVE_STEPS, WINDOW_SIZE, WINDOWS_PER_EPOCH, settings
from elastic.launching import Agent
from elastic.ledger import Ledger
from hf_ga.check.gradients import relative_error
from hf_ga.recovery.checkpoint import state_sha256

WORKER = Path(__file__).with_name("worker.py")
MAX_AGENTS = 3
TOLERANCE = 1e-6  # relative difference of a loss
# Seconds. Without a new window for so long, the run hangs; a change takes 20 to 40.
PATIENCE = 240.0
# Seconds between the end of the run and that of all agents, which torch lets wait for dead ones.
END_SECONDS = 20.0


@dataclass
class Event:
    """Something that happens to the machines of a run.

    Attributes:
        kind: What happens.
        after: The number of windows after which it happens.
        delay: Seconds after that window.
        agents: The number of agents before and after.
        time: When it happened, in seconds of `time.time()`.
    """

    kind: str
    after: int
    delay: float
    agents: tuple[int, int] = (0, 0)
    time: float = 0.0


class Machines:
    """The agents of a run.

    Args:
        folder: The folder of the run.
        worker: The worker's script and its arguments.
    """

    def __init__(self, folder: Path, worker: list[str]) -> None:
        """Start without agents."""
        self.folder = folder
        self.worker = worker
        self.agents: list[Agent] = []

    def join(self) -> None:
        """A machine joins."""
        name = f"agent-{len(self.agents)}"
        self.agents.append(Agent(self.folder, name, MAX_AGENTS, self.worker))

    @property
    def running(self) -> list[Agent]:
        """The agents that run and were not told to leave."""
        return [agent for agent in self.agents if agent.is_running]

    @property
    def have_ended_the_run(self) -> bool:
        """Whether an agent has ended without an error."""
        return any(agent.process.poll() == 0 for agent in self.agents)

    @property
    def ledger(self) -> Ledger:
        """What the workers have written so far."""
        return Ledger.read(self.folder / "ledger")

    def end(self) -> None:
        """Kill all agents that are left."""
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.kill()


def kill_worker(machines: Machines, random: np.random.Generator) -> None:
    """Kill the worker of one agent."""
    random.choice(machines.running).kill_worker()


def kill_agent(machines: Machines, random: np.random.Generator) -> None:
    """Kill an agent and its worker; after the last one, another machine comes."""
    random.choice(machines.running).kill()
    if not machines.running:
        machines.join()


def preempt(machines: Machines, random: np.random.Generator) -> None:
    """Send SIGTERM to an agent; after the last one, another machine comes."""
    random.choice(machines.running).terminate()
    if not machines.running:
        machines.join()


def join(machines: Machines, random: np.random.Generator) -> None:
    """A machine joins, or takes the place of one that is killed."""
    if len(machines.running) == MAX_AGENTS:
        kill_agent(machines, random)
    machines.join()


def two_at_once(machines: Machines, random: np.random.Generator) -> None:
    """Kill the worker of one agent, and at once another agent; or a machine joins at once."""
    kill_worker(machines, random)
    if len(machines.running) > 1:
        kill_agent(machines, random)
    else:
        machines.join()


KINDS: dict[str, Callable[[Machines, np.random.Generator], None]] = {
    "a worker is killed": kill_worker,
    "an agent is killed with its worker": kill_agent,
    "SIGTERM to an agent": preempt,
    "an agent joins": join,
    "two at once": two_at_once,
}


def draw_events(random: np.random.Generator, num_events: int, num_windows: int) -> list[Event]:
    """Draw the events of a run: all kinds in turn, in random order, at random windows. One of five
    comes at once after the one before, while the run starts again.
    """
    kinds: list[str] = []
    while len(kinds) < num_events:
        kinds += random.permutation(list(KINDS)).tolist()
    gaps = random.uniform(0.2, 1.0, num_events) * (random.uniform(size=num_events) > 0.2)
    gaps[0] = 0.5
    # The last windows are undisturbed, so that each event meets a run.
    afters = np.cumsum(gaps) / (gaps.sum() + 0.5) * (num_windows - 1)
    return [
        Event(kind, max(1, int(after)), float(random.uniform(0, 1)))
        for kind, after in zip(kinds, afters, strict=False)
    ]


class ElasticRun:
    """Runs one kind of training twice: undisturbed on one process, and with events.

    Args:
        folder: The folder of outputs and of the inputs, whose rows are numbered.
        door: What trains: "command", "accelerate", "trainer", or "stock" for Accelerate's own.
        epochs: The number of epochs.
        same_bits: The flag of the command; None for the others.
        pace: The least number of seconds of a step.
    """

    def __init__(
        self, folder: Path, door: str, epochs: int, same_bits: int | None, pace: float
    ) -> None:
        self.folder = folder
        self.door = door
        self.epochs = epochs
        self.same_bits = same_bits
        self.pace = pace
        self.num_windows = epochs * WINDOWS_PER_EPOCH

    def undisturbed(self) -> None:
        """Train on one process, without a launcher."""
        folder = self.folder / "undisturbed"
        command = [sys.executable, *self._worker(folder, pace=0.0)]
        with (folder / "run.log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise SystemExit(f"the undisturbed run failed: see {folder / 'run.log'}")

    def disturbed(self, events: list[Event], random: np.random.Generator, num_agents: int) -> None:
        """Train on agents that come and go.

        Args:
            events: What happens, in the order of time; each gets its time.
            random: Draws the agents.
            num_agents: How many agents begin.

        Raises:
            SystemExit: If the run does not end.
        """
        folder = self.folder / "elastic"
        machines = Machines(folder, self._worker(folder, pace=self.pace))
        for _ in range(num_agents):
            machines.join()
        try:
            for event in events:
                self._wait(lambda done, after=event.after: done >= after, machines)
                time.sleep(event.delay)
                self._happen(event, machines, random)
            self._wait(lambda done: done >= self.num_windows, machines)
            self._wait(lambda _: machines.have_ended_the_run, machines)
            deadline = time.monotonic() + END_SECONDS
            while machines.running and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            machines.end()

    def _happen(self, event: Event, machines: Machines, random: np.random.Generator) -> None:
        """Let an event happen now, and note what it met."""
        before = len(machines.running)
        event.time = time.time()
        num_done = machines.ledger.num_windows
        KINDS[event.kind](machines, random)
        event.agents = (before, len(machines.running))
        print(
            f"{event.kind} after window {num_done}: {before} -> {event.agents[1]} agents",
            flush=True,
        )

    def _wait(self, is_over: Callable[[int], bool], machines: Machines) -> None:
        """Wait until `is_over` is true of the number of windows so far; exit if no window was
        computed for `PATIENCE` seconds, or all agents have ended.
        """
        deadline = time.monotonic() + PATIENCE
        last = -1
        while True:
            done = machines.ledger.num_windows
            if is_over(done):
                return
            if done > last:
                deadline = time.monotonic() + PATIENCE
                last = done
            if time.monotonic() > deadline or not machines.running:
                logs = "\n".join(agent.last_lines() for agent in machines.agents[-MAX_AGENTS:])
                raise SystemExit(f"the run hangs, or has ended, after window {done}:\n{logs}")
            time.sleep(0.1)

    def _worker(self, folder: Path, pace: float) -> list[str]:
        """Write the job of a run's workers; return their command without the interpreter."""
        folder.mkdir()
        output = folder / "output"
        arguments = settings(
            self.folder,
            output,
            max_steps=None,
            num_train_epochs=self.epochs,
            eval_steps=10_000,
            save_steps=SAVE_STEPS,
            max_length=32,
            global_batch_size=WINDOW_SIZE,
            same_bits=self.same_bits,
        )
        job = {
            "door": self.door,
            "output": str(output),
            "ledger": str(folder / "ledger"),
            "epochs": self.epochs,
            "pace": pace,
            "settings": arguments,
        }
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        return [str(WORKER), str(path)]

    def report(self, events: list[Event]) -> list[str]:
        """Compare both runs, and print what was found.

        Args:
            events: What happened.

        Returns:
            One text for each promise that does not hold.
        """
        reference = Ledger.read(self.folder / "undisturbed" / "ledger")
        ledger = Ledger.read(self.folder / "elastic" / "ledger")
        found = ledger.miscounts(self.num_windows, WINDOWS_PER_EPOCH, NUM_SAMPLES)
        print_lost(events, ledger)
        losses = [np.array(one.losses()) for one in (ledger, reference)]
        difference = np.inf
        if len(losses[0]) == len(losses[1]):
            difference = np.max(np.abs(losses[0] / losses[1] - 1))
        computed = len(ledger.times())
        print(f"windows: {self.num_windows}, computed {computed} times in all")
        print(f"processes of the windows: {runs_of(ledger.num_processes())}")
        print(f"largest relative difference of a loss: {difference:.1e}")
        if not difference <= TOLERANCE:
            found.append(f"losses differ by {difference:.1e}")
        files = [self.folder / run / "output" for run in ("undisturbed", "elastic")]
        weights = [load_file(file / "model.safetensors") for file in files]
        error = relative_error(flat(weights[1]), flat(weights[0]))
        print(f"relative distance of the weights: {error:.1e}")
        hashes = [state_sha256(one) for one in weights]
        if self.same_bits and hashes[0] != hashes[1]:
            found.append(f"SHA-256 of the weights {hashes[1]}, undisturbed {hashes[0]}")
        print(f"SHA-256 of the weights: {hashes[1][:16]}, undisturbed {hashes[0][:16]}")
        if not found:
            print("each sample counted exactly once in each epoch")
        return found


def print_lost(events: list[Event], ledger: Ledger) -> None:
    """Print how long the run stood still at each event, and what it computed again.

    The run stands still from its last window before the restart that follows the event to the first
    new window after it. Events that come before one restart share it.
    """
    times = ledger.times()
    starts = sorted({start for _, _, start in times})
    for event in events:
        text = f"  {event.kind:<36}{event.agents[0]} -> {event.agents[1]} agents"
        restarts = [start for start in starts if start > event.time]
        if restarts:
            before = [entry for entry in times if entry[2] < restarts[0]]
            after = [entry for entry in times if entry[2] >= restarts[0]]
            num_done = 1 + max(window for _, window, _ in before)
            seconds = min(time for time, window, _ in after if window >= num_done) - before[-1][0]
            again = num_done - min(window for _, window, _ in after)
            text += f"  {seconds:6.1f} s without a new window, {max(0, again)} computed again"
        print(text)


def runs_of(numbers: list[int]) -> str:
    """Describe a sequence of numbers by the lengths of its constant parts.

    >>> runs_of([2, 2, 2, 1])
    '2 (3 windows), 1 (1 windows)'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if not parts or parts[-1][0] != number:
            parts.append([number, 0])
        parts[-1][1] += 1
    return ", ".join(f"{number} ({length} windows)" for number, length in parts)


def run_elastic_test(
    folder: Path, door: str, num_events: int, same_bits: int | None, seed: int
) -> int:
    """Run the elastic kill test in a folder with inputs.

    Returns:
        The exit code: 1 if a promise does not hold.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    # An agent takes about 10 s to start, which is as long as the windows between two events.
    epochs = 3 * num_events
    pace = 1.0
    run = ElasticRun(folder, door, epochs, same_bits, pace)
    run.undisturbed()
    random = np.random.default_rng(seed)
    events = draw_events(random, num_events, run.num_windows)
    start = time.time()
    run.disturbed(events, random, num_agents=MAX_AGENTS)
    print(f"{num_events} events in {time.time() - start:.0f} s")
    found = run.report(events)
    for problem in found:
        print(f"WRONG: {problem}")
    if not found:
        shutil.rmtree(folder / "elastic")
    return int(bool(found))
