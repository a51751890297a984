"""torch's elastic launcher: one agent for each machine, all of them on this one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

# Seconds. A machine is given up after `keep_alive_interval` x `keep_alive_max_attempt` without a
# sign of life, and after a change the others wait `last_call_timeout` for more of them to come.
RENDEZVOUS = {
    "store_type": "file",
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 5,
    "last_call_timeout": 3,
}
# Without it, a machine that joins later waits for an address that was published before it came
# (torch 2.13): both end after a minute.
JOINING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Agent:
    """A machine: torch's launcher with one worker process.

    Args:
        folder: The folder of the run. The rendezvous is a file in it, and so it survives any agent.
        name: The name of the agent's log.
        max_agents: The largest number of agents at once.
        worker: The worker's script and its arguments.
        grace: Seconds that the worker has after a SIGTERM.
    """

    def __init__(
        self, folder: Path, name: str, max_agents: int, worker: list[str], grace: int = 30
    ) -> None:
        """Start the agent."""
        settings = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{max_agents}"]
        command += ["--nproc_per_node=1", "--max_restarts=1000", "--monitor_interval=0.2"]
        command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={folder / 'rendezvous'}"]
        command += [f"--rdzv_id={folder.name}", "--rdzv_conf", settings]
        command += [f"--shutdown_timeout={grace}", *worker]
        self.log = folder / f"{name}.log"
        self.is_leaving = False
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | JOINING,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether the agent runs and was not told to leave."""
        return self.process.poll() is None and not self.is_leaving

    def kill_worker(self) -> None:
        """Kill the worker, if there is one: a crash of the script."""
        for worker in self._workers():
            worker.kill()

    def kill(self) -> None:
        """Kill the agent and its worker at once: the machine vanishes."""
        workers = self._workers()
        self.process.kill()
        for worker in workers:
            worker.kill()
        self.process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the agent, which passes it on: a notice of preemption."""
        self.is_leaving = True
        self.process.send_signal(signal.SIGTERM)

    def last_lines(self, number: int = 15) -> str:
        """The last lines of the agent's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-number:])

    def _workers(self) -> list[psutil.Process]:
        """The worker and its children (data workers)."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
