"""Check the gradients of hf_ga and Trainer, without and with dropout, on a small random model of
every class with a loss (head) in the installed transformers.

    python scripts/sweep_heads.py                  # about 40 heads, evenly spread
    python scripts/sweep_heads.py --full           # all of them
    python scripts/sweep_heads.py --only "Bert.*Classification"

Writes heads.md and heads.json. The exit code is 1 if hf_ga is wrong for a head.
"""

import argparse
import gc
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from heads.one_head import Head, Verdict, all_heads, examine
from heads.report import line, summary, write_report
from tqdm import tqdm

# The server process imports the modules of `PRELOAD` once; each head has a process of its own.
SERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["hf_ga", "hf_ga.check.arms", "transformers.models.auto.modeling_auto"]
TIME_LIMIT = 60.0  # seconds per head
WRITE_EVERY = 50  # heads


def send_verdict(sender: Connection, head: Head) -> None:
    """Examine a head (a model class of transformers with a loss) in this process, without warnings
    and on one thread, and send the verdict to the parent process.
    """
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    # transformers imports lazily: import the model's module before `gc.freeze`.
    getattr(transformers, head.class_name, None)
    gc.collect()
    # Exclude imported modules from the garbage collection after every run of Trainer.
    gc.freeze()
    sender.send(examine(head))


def sweep(
    heads: list[Head],
    jobs: int = 1,
    time_limit: float = TIME_LIMIT,
    send: Callable[[Connection, Head], None] = send_verdict,
) -> Iterator[Verdict]:
    """Examine heads (model classes of transformers with a loss), each in a separate process, so
    that a crash or hang only affects one head; yield their verdicts in order.

    Args:
        heads: The heads to examine.
        jobs: Number of processes at the same time.
        time_limit: Seconds per head.
        send: Function that a process runs: it sends the head's verdict through the connection.
    """
    examine_one = partial(examine_in_process, time_limit=time_limit, send=send)
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(examine_one, heads)


def examine_in_process(
    head: Head, time_limit: float, send: Callable[[Connection, Head], None]
) -> Verdict:
    """Examine a head (a model class of transformers with a loss) in a new process, which is killed
    at the end.

    Args:
        head: The head.
        time_limit: Seconds to wait for the verdict.
        send: Function that the process runs: it sends the verdict through the connection.

    Returns:
        The verdict with the seconds it took; "not built" with the reason if the process dies or
        takes too long.
    """
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=send, args=(sender, head), daemon=True)
    process.start()
    sender.close()
    start = time.perf_counter()
    try:
        if receiver.poll(time_limit):
            verdict = receiver.recv()
        else:
            verdict = Verdict(head, reason=f"took longer than {time_limit:.0f} s")
    except EOFError:
        process.join()
        verdict = Verdict(head, reason=f"the process died ({process.exitcode})")
    process.kill()
    process.join()
    verdict.seconds = time.perf_counter() - start
    return verdict


def evenly_spread(heads: list[Head], count: int) -> list[Head]:
    """Choose at most `count` heads, evenly spread over all heads sorted by kind and class name, the
    same on every call.
    """
    ordered = sorted(heads, key=lambda head: (head.kind, head.class_name))
    step = max(len(ordered) / max(count, 1), 1.0)
    indices = [int(i * step + step / 2) for i in range(min(count, len(ordered)))]
    return [ordered[index] for index in indices]


def main(arguments: list[str] | None = None) -> int:
    """Run the command scripts/sweep_heads.py.

    Args:
        arguments: The command-line flags. None: those of the process.

    Returns:
        The exit code: 1 if hf_ga is wrong for a head, 2 if no head matches --only, otherwise 0.
    """
    options = _parse_options(arguments)
    heads = all_heads()
    if options.only:
        heads = [
            head for head in heads if re.search(options.only, f"{head.name} {head.model_type}")
        ]
    elif not options.full:
        heads = evenly_spread(heads, options.sample)
    if not heads:
        print(
            f"no head matches --only {options.only!r}: give a regular expression on 'Class (kind) "
            "model_type'",
            file=sys.stderr,
        )
        return 2
    # The processes inherit it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    SERVER.set_forkserver_preload(PRELOAD)
    verdicts = _examine_all(heads, options)
    print("\n".join(summary(verdicts)))
    return int(any(verdict.status == "wrong" for verdict in verdicts))


def _examine_all(heads: list[Head], options: argparse.Namespace) -> list[Verdict]:
    """Examine heads, print one line for each, and write the report every `WRITE_EVERY` heads and at
    the end; return the verdicts in the order of the heads.
    """
    start = time.perf_counter()
    verdicts: list[Verdict] = []
    bar = tqdm(
        sweep(heads, options.jobs, options.time_limit),
        total=len(heads),
        unit="head",
        dynamic_ncols=True,
    )
    for verdict in bar:
        verdicts.append(verdict)
        bar.write(line(verdict), file=sys.stdout)
        sys.stdout.flush()
        if len(verdicts) % WRITE_EVERY == 0 or len(verdicts) == len(heads):
            minutes = (time.perf_counter() - start) / 60
            write_report(verdicts, len(heads), Path(options.output_dir), minutes)
    return verdicts


def _parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and validate the command-line flags; exit with an error if one is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--full", action="store_true", help="all heads")
    parser.add_argument(
        "--only", metavar="PATTERN", help="regular expression on 'Class (kind) model_type'"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=40,
        metavar="N",
        help="without --full and --only: about N heads",
    )
    parser.add_argument("--output_dir", default="sweep", help="folder for heads.md and heads.json")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--time_limit", type=float, default=TIME_LIMIT, help="seconds per head")
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.sample < 1 or options.time_limit <= 0:
        parser.error("--jobs and --sample must be at least 1, --time_limit above 0")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
