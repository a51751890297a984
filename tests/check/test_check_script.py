"""`python -m hf_ga.check train.py`: the splits of a script as it is, against its full batch.

The scripts are written for Accelerate and transformers alone. The script's own library is the
negative control: its splits differ.
"""

import json
import re
import subprocess
import sys

import check_worker
import pytest
import torch
from forked import run_script

from hf_ga.check.script import causes, main, relative_error, scale_of, splits_of
from hf_ga.check.script_arm import ArmResult
from hf_ga.errors import ConfigError

TEXTS = """
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

texts = [torch.arange(1, length) for length in (6, 20, 4, 3, 13, 9, 3, 18) * 2]
config = GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=32)
model = GPT2LMHeadModel(config).train()


def collate(rows):
    ids = pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids - 100 * (ids == 0)}
"""
ACCELERATE = (
    TEXTS
    + """
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(texts, 2, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
raise AssertionError("the script ran on after its first update")
"""
)
TRAINER = (
    TEXTS
    + """
from transformers import Trainer, TrainingArguments


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


arguments = TrainingArguments(
    "unused", per_device_train_batch_size=2, gradient_accumulation_steps=4, use_cpu=True,
    report_to=[], max_grad_norm=1e-3,
)
OwnTrainer(model, arguments, train_dataset=texts, data_collator=collate).train()
"""
)
BY_HAND = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(6, 8), LAYER, nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 2, shuffle=True))
for step, (x, y) in enumerate(loader):
    noisy = x + 0.1 * torch.randn_like(x)
    loss = F.cross_entropy(model(noisy), y, weight=torch.tensor([1.0, 2.0, 5.0]))
    accelerator.backward(loss / 4)
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
REFUSED = BY_HAND.replace("LAYER", "nn.BatchNorm1d(8)")
# Its mean over samples counts padding, and its 260 parameters would take a file descriptor each.
PADDED = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
model = nn.Sequential(nn.Embedding(30, 8), *[nn.LayerNorm(8) for _ in range(129)], nn.Linear(8, 30))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
texts = [torch.arange(1, length) for length in (6, 20, 4, 3, 13, 9, 3, 18) * 2]
loader = DataLoader(texts, 2, shuffle=True, collate_fn=lambda rows: pad_sequence(rows, True))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    with accelerator.accumulate(model):
        even = torch.full((30,), 1 / 30)
        accelerator.backward(F.kl_div(model(ids).log_softmax(-1), even, reduction="batchmean"))
        optimizer.step()
        optimizer.zero_grad()
"""
PREPARE = "model, optimizer, loader = "
LATE_STEPS = (
    ACCELERATE.replace("gradient_accumulation_steps=4, ", "")
    .replace("texts, 2", "texts, 32")
    .replace("=collate)", "=lambda rows: collate(rows), num_workers=1)")
    .replace(PREPARE, "accelerator.free_memory()\n" + PREPARE)
    .replace(
        "for batch in loader", "accelerator.gradient_accumulation_steps = 1\nfor batch in loader"
    )
)
LINE = re.compile(
    r"(hf_ga|accelerate\.Accelerator|transformers\.Trainer), (\d+) micro-batches: "
    r"relative error (\S+), (is|IS NOT)"
)


def rows_of(printed):
    """(name, micro-batches, error, verdict) of each line."""
    return [
        (name, int(number), float(error), verdict)
        for name, number, error, verdict in LINE.findall(printed)
    ]


# Name -> script, its splits, the library of the control, causes that are named.
RIGHT = {
    "Accelerate": (ACCELERATE, [2, 4, 8], "accelerate.Accelerator", ["cross entropy", "dropout"]),
    "Trainer": (TRAINER, [2, 4, 8], "transformers.Trainer", ["cross entropy", "dropout"]),
    "by hand": (
        BY_HAND.replace("LAYER", "nn.Dropout(0.1)"),
        [2, 4],
        "accelerate.Accelerator",
        ["cross entropy", "randn_like", "dropout"],
    ),
    # Steps that are set later, a batch size above the number of samples, and a worker, which would
    # run the script again if it did not fork.
    "late steps": (LATE_STEPS, [2, 4], "accelerate.Accelerator", ["dropout"]),
    "padded": (PADDED, [2, 4, 8], "accelerate.Accelerator", []),
}
# Script -> part of the error.
ERRORS = {
    "print(1)": "ended without an update",
    "raise RuntimeError('no such file')": "RuntimeError: no such file",
    "import tqdm\nbar = tqdm.tqdm(total=4)\nraise RuntimeError('no such file')": (
        "RuntimeError: no such file"
    ),
    ACCELERATE.replace("model = GPT2", "torch.seed()\nmodel = GPT2"): "seed it",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The folder of the scripts; script -> exit code of its check, output and errors."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = [script for script, *_ in RIGHT.values()] + [*ERRORS, REFUSED]
    job = {}
    for number, script in enumerate(scripts):
        path = folder / f"train-{number}.py"
        path.write_text(script)
        job[script] = [*([] if script == REFUSED else ["--assert"]), str(path)]
    return folder, json.loads(run_script(check_worker.__file__, folder, job))


@pytest.mark.slow("starts seven processes for each script")
@pytest.mark.parametrize("case", RIGHT)
def test_splits_of_a_script_are_its_full_batch(checked, case):
    script, splits, library, words = RIGHT[case]
    folder, found = checked
    code, printed, errors = found[script]
    assert code == 0, errors
    *ours, (name, number, error, verdict) = rows_of(printed)
    assert [row[1] for row in ours] == splits
    assert all(row[0] == "hf_ga" and 0 < row[2] < 1e-6 and row[3] == "is" for row in ours)
    assert (name, number, verdict) == (library, 4, "IS NOT")
    assert error > 1e-2
    for word in words:
        assert re.search(rf"\n    .*{word}", printed), printed
    of_window = "16 samples, which the script splits into 1"
    if script is not LATE_STEPS:
        of_window = "8 samples, which the script splits into 4"
    assert f"window of {of_window}" in printed
    assert not (folder / "unused").exists() or not any((folder / "unused").iterdir())


@pytest.mark.slow("starts a process")
def test_a_script_that_is_refused_fails_the_check(checked, tmp_path):
    """With --assert, by the command itself; without, it is said only."""
    (tmp_path / "train.py").write_text(REFUSED)
    command = [sys.executable, "-m", "hf_ga.check", "--assert", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    code, said, _ = checked[1][REFUSED]
    assert (done.returncode, code) == (1, 0)
    for printed in (done.stdout, said):
        assert rows_of(printed) == []
        assert re.search(r"refuses the script .*train.*\.py, line \d+: the mean of", printed)
        assert "BatchNorm" in printed


@pytest.mark.slow("starts processes for each script")
def test_what_cannot_be_checked_is_one_error(checked, capsys):
    for script, words in ERRORS.items():
        code, printed, errors = checked[1][script]
        assert code == 2, printed
        assert words in errors + printed
    assert main(["absent.py"]) == 2
    assert main(["--help"]) == 0
    assert "absent.py is no file. usage: python -m hf_ga.check" in capsys.readouterr().err


def test_splits_are_the_script_s_own_and_its_neighbours():
    def report(number, samples, is_by_hand=False):
        return ArmResult("Accelerator", number, is_by_hand=is_by_hand, num_samples=samples)

    assert splits_of(report(4, 8)) == [2, 4, 8]
    assert splits_of(report(1, 6)) == [2, 3]
    assert splits_of(report(4, 32, is_by_hand=True)) == [2, 4]
    assert splits_of(report(3, 21)) == [3, 7, 21]


def test_causes_are_divisors_that_differ_and_draws():
    same = ("the mean of A", [2.0, 2.0])
    other = ("the mean of B", [float(n) for n in range(12)])
    report = ArmResult("Trainer", 2, terms=[same, other], draws={"randn": "train.py:3"})
    first, second = causes(report)
    assert first.startswith("the mean of B divides by 0, 1, 2, 3, 4, 5, 6, 7, ...: ")
    assert second == "randn (train.py:3) draws other numbers in each split"
    (added_up,) = causes(ArmResult("Trainer", 4, terms=[same]), 3.9)
    assert "about 3.9 times that of the full batch" in added_up
    assert causes(ArmResult("Trainer", 2, terms=[same]), 1.0) == [
        "neither divisors nor draws differ: state that the loop keeps, or kernels"
    ]


@pytest.mark.parametrize(
    ("change", "words"), [({"num_samples": 7}, "7 samples"), ({"weights": 2.0}, "seed it")]
)
def test_runs_of_other_windows_or_weights_are_not_compared(change, words):
    def result(**more):
        gradients = {"0": torch.tensor([3.0, 4.0])}
        found = {"gradients": gradients, "num_samples": 8, "weights": 1.0}
        return ArmResult("Trainer", 2, **found | more)

    four_times = result(gradients={"0": torch.tensor([12.0, 16.0])})
    assert scale_of(four_times, result()) == pytest.approx(4.0)
    assert relative_error(result(), result()) == 0
    with pytest.raises(ConfigError, match=words):
        relative_error(result(**change), result())
