"""Build every head of the installed transformers small, and check the gradients of hf_ga and
Trainer, without and with dropout.

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

# Imports once; each head still has a process of its own.
SERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["hf_ga", "hf_ga.check.arms", "transformers.models.auto.modeling_auto"]
TIME_LIMIT = 60.0  # seconds per head
WRITE_EVERY = 50  # heads


def sweep(
    heads: list[Head],
    jobs: int = 1,
    time_limit: float = TIME_LIMIT,
    send: Callable[[Connection, Head], None] | None = None,
) -> Iterator[Verdict]:
    """Yield verdicts in the order of the heads, each from a separate process: one that dies or
    hangs costs its own head only.

    Args:
        heads: The heads to examine.
        jobs: Number of processes at once.
        time_limit: Seconds per head.
        send: What a process runs. Default: `send_verdict`.
    """
    examine_one = partial(examine_apart, time_limit=time_limit, send=send or send_verdict)
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(examine_one, heads)


def examine_apart(
    head: Head, time_limit: float, send: Callable[[Connection, Head], None]
) -> Verdict:
    """Examine a head in a new process.

    Returns:
        Its verdict; "not built" with the reason if the process dies or takes too long.
    """
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=send, args=(sender, head), daemon=True)
    process.start()
    sender.close()
    begin = time.perf_counter()
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
    verdict.seconds = time.perf_counter() - begin
    return verdict


def send_verdict(sender: Connection, head: Head) -> None:
    """Examine a head: quiet, on one thread."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    # Imports the architecture.
    getattr(transformers, head.class_name, None)
    gc.collect()
    # Excludes imports from the garbage collection after every run of Trainer.
    gc.freeze()
    sender.send(examine(head))


def evenly_spread(heads: list[Head], count: int) -> list[Head]:
    """Choose about `count` heads, of all kinds and evenly spread over their names."""
    ordered = sorted(heads, key=lambda head: (head.kind, head.class_name))
    step = max(len(ordered) / max(count, 1), 1.0)
    places = [int(i * step + step / 2) for i in range(min(count, len(ordered)))]
    return [ordered[place] for place in places]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 1 if hf_ga is wrong for a head, 2 for a bad flag, else 0.
    """
    options = _options(arguments)
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
    # For the processes.
    os.environ["HF_HUB_OFFLINE"] = "1"
    SERVER.set_forkserver_preload(PRELOAD)
    verdicts = _examine_all(heads, options)
    print("\n".join(summary(verdicts)))
    return int(any(verdict.status == "wrong" for verdict in verdicts))


def _examine_all(heads: list[Head], options: argparse.Namespace) -> list[Verdict]:
    """Examine heads, print one line each, and write the report every `WRITE_EVERY` heads and at the
    end.
    """
    begin = time.perf_counter()
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
            minutes = (time.perf_counter() - begin) / 60
            write_report(verdicts, len(heads), Path(options.output_dir), minutes)
    return verdicts


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the flags."""
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
