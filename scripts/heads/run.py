"""The sweep over all heads: a worker process examines one head after another, and is replaced if it dies or takes too long."""

import argparse
import gc
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue

from tqdm import tqdm

from heads.one_head import Head, Verdict, all_heads, examine
from heads.report import line, summary, write_report

TIME_LIMIT = 60.0  # seconds per head
WRITE_EVERY = 50  # heads
START_LIMIT = 300.0  # seconds until a worker has imported everything


class Worker:
    """A process that examines heads one by one. If it dies or hangs, it is replaced, and only the current head is lost."""

    def __init__(self, time_limit: float, serve: Callable[[Connection], None]) -> None:
        self.time_limit, self.serve = time_limit, serve
        self.process: multiprocessing.Process | None = None

    def examine(self, head: Head) -> Verdict:
        """The verdict on a head; "not built" with the reason if the process died."""
        begin = time.perf_counter()
        try:
            self._start()
            begin = time.perf_counter()
            self.connection.send(head)
            if not self.connection.poll(self.time_limit):
                raise TimeoutError(f"took longer than {self.time_limit:.0f} s")
            verdict = self.connection.recv()
        except (EOFError, OSError) as error:  # a TimeoutError is an OSError
            self.stop()
            reason = str(error) if isinstance(error, TimeoutError) else f"the process died ({self.exit_code})"
            verdict = Verdict(head.name, head.model_type, head.class_name, head.kind, reason=reason)
        verdict.seconds = time.perf_counter() - begin
        return verdict

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.exit_code, self.process = self.process.exitcode, None
            self.connection.close()

    def _start(self) -> None:
        if self.process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        self.process = context.Process(target=self.serve, args=(worker_end,), daemon=True)
        self.process.start()
        worker_end.close()
        if not self.connection.poll(START_LIMIT):
            raise TimeoutError("the worker did not start")
        self.connection.recv()


def sweep(
    heads: list[Head], jobs: int = 1, time_limit: float = TIME_LIMIT, serve: Callable[[Connection], None] | None = None
) -> Iterator[Verdict]:
    """Verdicts in the order of the heads.

    Args:
        jobs: worker processes. time_limit: seconds per head.
        serve: the worker's function (default: `serve_heads`), which sends "ready", then a verdict for every received head.
    """
    workers = [Worker(time_limit, serve or serve_heads) for _ in range(jobs)]
    idle: Queue[Worker] = Queue()
    for worker in workers:
        idle.put(worker)

    def one(head: Head) -> Verdict:
        worker = idle.get()
        try:
            return worker.examine(head)
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, heads)
    finally:
        for worker in workers:
            worker.stop()


def evenly_spread(heads: list[Head], count: int) -> list[Head]:
    """About `count` heads, of all kinds and evenly spread over their names."""
    ordered = sorted(heads, key=lambda head: (head.kind, head.class_name))
    step = max(len(ordered) / max(count, 1), 1.0)
    return [ordered[int(i * step + step / 2)] for i in range(min(count, len(ordered)))]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 1 if hf_ga is wrong for a head, 2 for a bad flag, otherwise 0."""
    options = _options(arguments)
    heads = all_heads()
    if options.only:
        heads = [head for head in heads if re.search(options.only, f"{head.name} {head.model_type}")]
    elif not options.full:
        heads = evenly_spread(heads, options.sample)
    if not heads:
        print(f"no head matches --only {options.only!r}: give a regular expression on 'Class (kind) model_type'", file=sys.stderr)
        return 2
    verdicts = _examine_all(heads, options)
    print("\n".join(summary(verdicts)))
    return int(any(verdict.status == "wrong" for verdict in verdicts))


def _examine_all(heads: list[Head], options: argparse.Namespace) -> list[Verdict]:
    """Examine heads, print one line each, and write the report every `WRITE_EVERY` heads and at the end."""
    begin, verdicts = time.perf_counter(), []
    bar = tqdm(sweep(heads, options.jobs, options.time_limit), total=len(heads), unit="head", dynamic_ncols=True)
    for verdict in bar:
        verdicts.append(verdict)
        bar.write(line(verdict), file=sys.stdout)
        sys.stdout.flush()
        if len(verdicts) % WRITE_EVERY == 0 or len(verdicts) == len(heads):
            write_report(verdicts, len(heads), Path(options.output_dir), (time.perf_counter() - begin) / 60)
    return verdicts


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--full", action="store_true", help="all heads")
    parser.add_argument("--only", metavar="PATTERN", help="regular expression on 'Class (kind) model_type'")
    parser.add_argument("--sample", type=int, default=40, metavar="N", help="without --full and --only: about N heads")
    parser.add_argument("--output_dir", default="sweep", help="folder for heads.md and heads.json")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--time_limit", type=float, default=TIME_LIMIT, help="seconds per head")
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.sample < 1 or options.time_limit <= 0:
        parser.error("--jobs and --sample must be at least 1, --time_limit above 0")
    return options


def serve_heads(connection: Connection) -> None:
    """The worker's function: quiet, offline, one thread."""
    import warnings

    import torch
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            head = connection.recv()
        except EOFError:
            return
        getattr(transformers, head.class_name, None)  # imports the architecture
        gc.collect()
        gc.freeze()  # excludes imports from the garbage collection after every run of Trainer
        connection.send(examine(head))
