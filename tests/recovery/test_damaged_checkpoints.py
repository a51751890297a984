"""Files that are cut, flipped, foreign or swapped are never loaded; a crash between any two
operations leaves what is whole.
"""

import hashlib
import itertools
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from torch.distributed.checkpoint.api import CheckpointException

import hf_ga
from hf_ga.errors import CheckpointError
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.run.results.outputs import save_best, save_last
from hf_ga.recovery.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    state_sha256,
)
from hf_ga.recovery.files import tidy
from hf_ga.recovery.latest import find_checkpoint, set_latest
from hf_ga.recovery.manifest import read_manifest, verify
from hf_ga.recovery.saving import save_checkpoint

ALONE = SimpleNamespace(
    is_main_process=True, num_processes=1, device=torch.device("cpu")
)  # all that finding needs of an Accelerator
STEPS = (2, 4, 6)
DRAWS = 40
SHARD = "shards/shard-00001-model-00001-of-00001.safetensors"
FILES = [SHARD, "state.json", "manifest.json", "latest"]
DAMAGES = ["flipped", "flipped", "truncated", "foreign", "swapped"]


def trained(width: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save_in(folder: Path, step: int, seed: int, width: int = 3, keep: int = 9) -> Path:
    return save_checkpoint(
        ALONE, folder, *trained(width, seed), {"run": seed}, step=step, keep=keep
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run, another one with the same shapes, and one with other shapes; each with three
    checkpoints.
    """
    root = tmp_path_factory.mktemp("runs")
    for name, first_seed, width in (("own", 0, 3), ("foreign", 100, 3), ("wide", 200, 4)):
        for step in STEPS:
            save_in(root / name, step, first_seed + step, width)
    return root


def path_of(output: Path, file: str, step: int = 6) -> Path:
    return output / "latest" if file == "latest" else output / f"checkpoint-{step}" / file


def damage(output: Path, runs: Path, file: str, how: str, rng: random.Random) -> set[Path]:
    """Returns the files that are not what they were."""
    path = path_of(output, file)
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "flipped":
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
    elif how == "foreign":  # of the same shapes, where that makes a difference
        others = [path_of(runs / name, file).read_bytes() for name in ("foreign", "wide")]
        if file == "latest" and data in others:  # it holds a name only
            return set()
        path.write_bytes(next(other for other in others if other != data))
    else:  # with the same file of another step, or with another file
        others = [
            other
            for other in sorted(output.rglob("*"))
            if other.is_file() and other.read_bytes() != data
        ]
        same_name = [other for other in others if other.name == path.name]
        other = rng.choice(rng.choice([same_name or others, others]))
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return {path, other}
    return {path}


def draws() -> list[tuple[str, str, int]]:
    """(file, damage, seed of its position): each kind of damage in each kind of file equally
    often.
    """
    kinds = [(file, how) for file in FILES for how in DAMAGES]
    return [(*kinds[i % len(kinds)], i) for i in range(DRAWS)]


def check_draw(output: Path, touched: set[Path], said: str, found: Path) -> None:
    """What `auto` found and said, and what each checkpoint by itself does, of one damaged
    folder.
    """
    whole = [
        step
        for step in STEPS
        if not any(output / f"checkpoint-{step}" in path.parents for path in touched)
    ]
    if output / "latest" in touched:  # it may name another whole one, or none
        assert found.name in {f"checkpoint-{step}" for step in whole}
    else:
        assert found == output / f"checkpoint-{whole[-1]}"
    for step in STEPS:
        folder, (model, optimizer) = output / f"checkpoint-{step}", trained(3, 1)
        if step in whole:
            verify(folder)
            assert load_checkpoint(folder, model, optimizer) == {"step": step, "run": step}
            continue
        with pytest.raises(hf_ga.CheckpointError) as error:
            verify(folder)
        assert str(folder) in str(error.value)
        assert any(path.name in str(error.value) for path in touched if folder in path.parents)
        if step > whole[-1] and output / "latest" not in touched:
            assert (
                f"skipped {folder.name}, resuming from checkpoint-{whole[-1]}: {error.value}"
                in said
            )


def test_no_damaged_file_is_ever_loaded(runs, tmp_path, capsys):
    """Not by name and not by `auto`, which takes the newest whole checkpoint; the error names the
    file.
    """
    for file, how, seed in draws():
        output = tmp_path / str(seed)
        shutil.copytree(runs / "own", output)
        touched = damage(output, runs, file, how, random.Random(seed))
        found = find_checkpoint(ALONE, output, "auto")
        try:
            check_draw(output, touched, capsys.readouterr().out, found)
        except AssertionError as error:
            raise AssertionError(
                f"draw {seed}: {file} {how}, touched {sorted(touched)}: {error}"
            ) from error
        shutil.rmtree(output)


# What a look at single files would not find


def test_none_whole(runs, tmp_path):
    """Every one is named with its damaged file."""
    shutil.copytree(runs / "own", tmp_path / "out")
    files = ("checkpoint-2/state.json", f"checkpoint-4/{SHARD}", "checkpoint-6/manifest.json")
    for file in files:
        (tmp_path / "out" / file).write_bytes(b"")
    with pytest.raises(
        hf_ga.CheckpointError, match="has no undamaged checkpoint to resume from"
    ) as error:
        find_checkpoint(ALONE, tmp_path / "out", "auto")
    assert all(str(tmp_path / "out" / file) in str(error.value) for file in files)


def test_latest_goes_before_newer_ones(runs, tmp_path, capsys):
    """After a resume from checkpoint-4, checkpoint-6 is a future that was given up: the second
    choice.
    """
    output = tmp_path / "out"
    shutil.copytree(runs / "own", output)
    set_latest(output / "checkpoint-4")
    for expected in ("checkpoint-4", "checkpoint-6", "checkpoint-2"):
        assert find_checkpoint(ALONE, output, "auto").name == expected
        (output / expected / SHARD).unlink()
    assert (
        f"checkpoint-4/{SHARD} cannot be read: No such file or directory" in capsys.readouterr().out
    )


def test_manifest_lists_versions_and_all_files(runs):
    folder = runs / "own" / "checkpoint-6"
    manifest = read_manifest(folder)
    assert manifest["step"] == 6
    assert manifest["versions"]["torch"] == version("torch")
    files = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    del files["manifest.json"]
    assert manifest["files"] == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
    }


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("{} ", "is damaged"),
        ('{{"state.json": "0123"}}', "is damaged"),
        ('{{"format": 1, "sha256": "0123"}}', "has format 1"),
    ],
    ids=["a blank more", "a list of files", "format 1"],
)
def test_a_manifest_of_another_form(form, words, runs, tmp_path):
    """Also where it states the same."""
    folder = shutil.copytree(runs / "own" / "checkpoint-6", tmp_path / "checkpoint-6")
    (folder / "manifest.json").write_text(form.format((folder / "manifest.json").read_text()))
    with pytest.raises(hf_ga.CheckpointError, match=rf"manifest\.json {words}"):
        verify(folder)
    assert list_checkpoints(tmp_path) == [folder]


# A crash between any two operations


Work = Callable[[Path], object]


class Crash(BaseException):
    """Stands for the end of the process: nothing of hf_ga catches it."""


class Crasher:
    """Raises at the k-th operation that changes a disk (opening to write, making, renaming,
    deleting, fsync), while it is armed.

    An audit hook stays for ever, so there is one of them.
    """

    EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple) -> None:
        if event in self.EVENTS or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            self.count()

    def count(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:  # for good: what would put things right does not come to it
                raise Crash

    def survives(self, k: int, work: Callable[[], object]) -> bool:
        """Whether `work` was over before its k-th operation."""
        self.left = k
        try:
            work()
        except (
            Crash,
            CheckpointError,
            CheckpointException,
        ) as error:  # torch's distributed checkpoint wraps whatever is raised
            assert "Crash" in str(error) or isinstance(error, Crash)
            return False
        finally:
            self.left = None
        return True


@pytest.fixture(scope="module")
def crasher() -> Iterator[Crasher]:
    crasher = Crasher()
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (crasher.count(), fsync(descriptor)))
        yield crasher


def leftovers(folder: Path) -> list[str]:
    return [
        path.name
        for path in folder.iterdir()
        if path.name.startswith(("partial-", "replaced-")) or path.suffix == ".partial"
    ]


def crash_everywhere(
    crasher: Crasher, start: Path, place: Path, work: Work, check: Callable[[Path], str]
) -> list[str]:
    """What `check` finds after a crash of `work` before its first, second, ... operation, and at
    last after none.
    """
    found = []
    for k in itertools.count():
        shutil.copytree(start, place / str(k))
        survived = crasher.survives(k, partial(work, place / str(k)))
        found.append(check(place / str(k)))
        shutil.rmtree(place / str(k))
        if survived:
            return found


@pytest.mark.parametrize(
    ("latest", "step", "kept"),
    [(2, 4, 2), (6, 6, 4)],
    ids=["in place of a future given up", "the same step again"],
)
def test_a_crash_while_saving_leaves_the_old_or_the_new_one(
    latest, step, kept, runs, tmp_path, crasher
):
    """Two are kept. Whatever is there, `auto` finds a whole one; and the next save leaves nothing
    of the crash.
    """
    start = tmp_path / "start"
    shutil.copytree(runs / "own", start)
    set_latest(start / f"checkpoint-{latest}")

    def save(output: Path) -> None:
        save_in(output, step, seed=50, keep=2)

    def check(output: Path) -> str:
        found = find_checkpoint(ALONE, output, "auto")
        assert [
            verify(folder) for folder in list_checkpoints(output)
        ]  # none is half under its name, not even one to be deleted
        model, optimizer = trained(3, 1)
        state = load_checkpoint(found, model, optimizer)
        assert state_sha256(model.state_dict()) == state_sha256(
            trained(3, state["run"])[0].state_dict()
        )
        save(output)
        assert not leftovers(output)
        assert [folder.name for folder in list_checkpoints(output)] == [
            f"checkpoint-{kept}",
            f"checkpoint-{step}",
        ]
        assert find_checkpoint(ALONE, output, "auto").name == f"checkpoint-{step}"
        return f"{found.name} of {state['run']}"

    found = crash_everywhere(crasher, start, tmp_path, save, check)
    before = f"checkpoint-{latest} of {latest}"
    after = f"checkpoint-{step} of 50"
    assert found == [before] * found.count(before) + [after] * found.count(
        after
    )  # one instant, and nothing else ever
    assert found.count(before) > 10
    assert found.count(after) > 5


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tf.PreTrainedModel]:
    """An old and a new one."""
    made = {}
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        made[name] = tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=20, n_embd=4, n_layer=1, n_head=1, n_positions=8)
        )
    return made


@pytest.fixture(scope="module")
def setup() -> Callable[[Path], SimpleNamespace]:
    data = SimpleNamespace(tokenizer=corpus.train_tokenizer(["a window of samples"] * 3, 270))
    return lambda output: SimpleNamespace(
        output_dir=output, data=data, dtype=torch.float32, accelerator=Accelerator(cpu=True)
    )


def loaded_as(folder: Path, models: dict[str, tf.PreTrainedModel]) -> str:
    """Which model `from_pretrained` finds in a folder; fails where it is neither."""
    if not (folder / "config.json").exists():
        with pytest.raises((OSError, ValueError), match=r"config\.json"):
            tf.AutoModelForCausalLM.from_pretrained(folder)
        return "none"
    loaded = state_sha256(tf.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    tf.AutoTokenizer.from_pretrained(folder)
    return next(
        name for name, model in models.items() if state_sha256(model.state_dict()) == loaded
    )


@pytest.mark.slow("a whole run")
def test_a_crash_while_the_best_model_is_saved(models, setup, tmp_path, crasher):
    """The old or the new one; and what lies between two renames is put right when a run begins."""
    save_best(setup(tmp_path / "start"), models["old"])

    def check(output: Path) -> str:
        if (output / "best").exists():
            loaded_as(output / "best", models)  # before anything is put right
        tidy(output)
        assert not leftovers(output)
        return loaded_as(output / "best", models)

    def save(output: Path) -> None:
        save_best(setup(output), models["new"])

    found = crash_everywhere(crasher, tmp_path / "start", tmp_path, save, check)
    assert found == ["old"] * found.count("old") + ["new"] * found.count("new")
    assert found.count("old") > 10
    assert found.count("new") > 3


@pytest.mark.slow("a whole run")
def test_a_crash_while_the_last_model_is_saved(models, setup, tmp_path, crasher):
    """The old one, none that could be loaded, the new one; and whatever it was, saving again gives
    the new one.
    """
    save_last(setup(tmp_path / "start"), models["old"], models["old"].state_dict())

    def save(output: Path) -> None:
        save_last(setup(output), models["new"], models["new"].state_dict())

    def check(output: Path) -> str:
        found = loaded_as(output, models)
        save(output)
        assert loaded_as(output, models) == "new"
        assert not leftovers(output)
        return found

    found = crash_everywhere(crasher, tmp_path / "start", tmp_path, save, check)
    counts = [found.count(name) for name in ("old", "none", "new")]
    assert found == ["old"] * counts[0] + ["none"] * counts[1] + ["new"] * counts[2]
    assert all(count > 1 for count in counts)
