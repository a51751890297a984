"""`python -m hf_ga.run script.py`: a script is run as it is, in two layouts of the same windows.

Each script is written for Accelerate, transformers or TRL alone. Plain Python on the same script is
the control: its layouts differ.
"""

import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import IO

import helpers as h
import launching
import pytest
import torch
import transformers.trainer  # noqa: F401  (so that no forked process imports it by itself)
from accelerate.state import AcceleratorState
from forked import ForkedPython, on_two_ranks, run_forked, without_errors
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from hf_ga import run

SHARED = """
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

per_device, steps, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16))
rows = [list(torch.randint(3, 40, (2 + i * 7 % 11,)).numpy()) for i in range(20)]
"""

ACCELERATE = """
import helper
from accelerate import Accelerator
from torch.utils.data import DataLoader


def collate(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids - 100 * (ids == 0)}


class LoudAccelerator(Accelerator):
    pass


accelerator = LoudAccelerator(gradient_accumulation_steps=steps, cpu=True)
assert type(accelerator).__name__ == "LoudAccelerator" and isinstance(accelerator, LoudAccelerator)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(rows, batch_size=per_device, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss + helper.ZERO)
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), out)
"""

TRAINER = """
import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer_seq2seq import Seq2SeqTrainer

base = Seq2SeqTrainer if sys.argv[4:] == ["seq2seq"] else Trainer


class SmoothedTrainer(base):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        labels = inputs["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)


def collate(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return {"input_ids": ids, "labels": ids - 100 * (ids == 0)}


keys = dict(
    output_dir=out + ".folder", per_device_train_batch_size=per_device, save_strategy="no",
    gradient_accumulation_steps=steps, num_train_epochs=1, learning_rate=0.1, optim="sgd",
    use_cpu=True, report_to=[], remove_unused_columns=False, disable_tqdm=True, max_grad_norm=0,
    lr_scheduler_type="constant",
)
name = "Seq2SeqTrainingArguments" if base is Seq2SeqTrainer else "TrainingArguments"
trainer = SmoothedTrainer(
    model, getattr(transformers, name)(**keys), train_dataset=rows, data_collator=collate
)
assert isinstance(trainer, transformers.Trainer) and isinstance(trainer, SmoothedTrainer)
trainer.train()
if trainer.is_world_process_zero():
    torch.save(model.state_dict(), out)
"""

SFT = """
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {f"w{number}": number for number in range(38)} | {"<pad>": 38, "<eos>": 39}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_list([{"text": " ".join(f"w{id % 38}" for id in row)} for row in rows])
arguments = trl.SFTConfig(
    out + ".folder", per_device_train_batch_size=per_device, gradient_accumulation_steps=steps,
    num_train_epochs=1, learning_rate=0.1, optim="sgd", use_cpu=True, bf16=False, report_to=[],
    save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=0,
    packing=sys.argv[4:] == ["packing"], max_length=12,
)
trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
torch.save(model.state_dict(), out)
"""
SCRIPTS = {"accelerate": ACCELERATE, "trainer": TRAINER, "sft": SFT}
LAYOUTS = ((8, 1), (2, 4))
RUN = ("-m", "hf_ga.run")
CLOSE = 1e-6


def write(folder: Path, body: str) -> Path:
    """A script, with a module beside it that it may import."""
    (folder / "helper.py").write_text("ZERO = 0.0\n")
    script = folder / "train.py"
    script.write_text(SHARED + body)
    return script


def python(*arguments: object) -> subprocess.CompletedProcess:
    """A new process of Python, in another folder than the script's."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def forked(*arguments: object) -> subprocess.CompletedProcess:
    """As `python`, in a process that has imported the libraries before the script does."""
    words = [str(word) for word in arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            _become(words, out, err)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def _become(words: list[str], out: IO[str], err: IO[str]) -> None:
    """Run a script in this process, and end it."""
    sys.stdout = out
    sys.stderr = err
    warnings.simplefilter("ignore")  # which are errors in a test
    AcceleratorState._reset_state(True)
    code = 0
    try:
        if words[:2] == [*RUN]:
            code = run.main(words[2:])
        else:
            run.run_as_main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    out.flush()
    err.flush()
    os._exit(code)


def error_between_layouts(
    folder: Path, body: str, *more: str, options: tuple[str, ...] = RUN
) -> float:
    """Train in two layouts, and return the relative error of the weights."""
    script = write(folder, body)
    weights = []
    for batch_size, steps in LAYOUTS:
        out = folder / f"{batch_size}x{steps}.pt"
        done = forked(*options, script, batch_size, steps, out, *more)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("hf_ga.run:") == (1 if options else 0), done.stderr
        weights.append(torch.load(out))
    return h.relative_error(weights[1], weights[0])


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("name", SCRIPTS)
def test_layouts_make_the_same_weights_and_without_it_they_do_not(tmp_path, name):
    if name == "sft":
        pytest.importorskip("trl")
    assert error_between_layouts(tmp_path, SCRIPTS[name]) < CLOSE
    assert error_between_layouts(tmp_path, SCRIPTS[name], options=()) > 1000 * CLOSE


@pytest.mark.slow("starts processes")
def test_seq2seq_trainer(tmp_path):
    assert error_between_layouts(tmp_path, TRAINER, "seq2seq") < CLOSE


def launched(*words: str) -> list[subprocess.CompletedProcess]:
    """By `accelerate launch`, in processes that are forked."""
    command = [*launching.words_of_launch(2), *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_handler, "Popen", ForkedPython)
        done = run_forked(command, Path.cwd())
    return [subprocess.CompletedProcess(command, *done)]


def on_forked_ranks(*words: str) -> list[subprocess.CompletedProcess]:
    return without_errors(on_two_ranks(lambda: forked(*words)))


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("name", "start"), [("accelerate", launched), ("trainer", on_forked_ranks)]
)
def test_two_processes_make_the_weights_of_one(tmp_path, name, start):
    script = write(tmp_path, SCRIPTS[name])
    one = tmp_path / "one.pt"
    two = tmp_path / "two.pt"
    assert forked(*RUN, script, 8, 1, one).returncode == 0
    processes = start(*RUN, str(script), "2", "2", str(two))
    errors = "".join(done.stderr for done in processes)
    assert not any(done.returncode for done in processes), errors
    assert errors.count("hf_ga.run:") == 1, errors  # on the main process only
    assert h.relative_error(torch.load(two), torch.load(one)) < CLOSE


def refused(folder: Path, body: str, *more: str) -> str:
    """Run a script that is refused, and return the line that is printed."""
    script = write(folder, body)
    done = forked(*RUN, script, 4, 2, folder / "out.pt", *more)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "Traceback" not in done.stderr
    assert lines[0].startswith(f"error: {script}")
    return lines[0]


@pytest.mark.slow("starts processes")
def test_packed_rows_of_trl_are_refused(tmp_path):
    pytest.importorskip("trl")
    assert "packing" in refused(tmp_path, SFT, "packing")


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("trl", "GRPOTrainer"),
        ("trl", "KTOTrainer"),
        ("trl.experimental.gkd", "GKDTrainer"),  # of SFTTrainer
    ],
)
def test_other_trainers_of_trl_are_refused_by_name(tmp_path, module, name):
    pytest.importorskip("trl")
    body = f"from {module} import {name}\n\nclass Mine({name}):\n    pass\n\nMine(model)\n"
    assert name in refused(tmp_path, body)


@pytest.mark.slow("starts processes")
def test_an_error_of_the_script_stays_as_it_is(tmp_path):
    done = forked(*RUN, write(tmp_path, "raise KeyError('mine')"), 4, 2, "out")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr


@pytest.mark.slow("starts processes")
def test_a_script_that_makes_no_accelerator_is_said_to_run_unchanged(tmp_path):
    done = forked(*RUN, write(tmp_path, "print(__name__, sys.argv[1:])\nsys.exit(0)"), 4, 2, "out")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "__main__ ['4', '2', 'out']"
    assert "made neither" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--flag"], ["missing.py"]])
def test_without_a_script_it_shows_its_usage(arguments):
    done = python(*RUN, *arguments)
    assert done.returncode == 2
    assert "usage: python -m hf_ga.run SCRIPT.py" in done.stderr


@pytest.mark.slow("starts processes")
def test_the_script_sets_its_environment_before_the_libraries_are_imported(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "assert not {'torch', 'transformers', 'accelerate', 'huggingface_hub'} & set(sys.modules)\n"
        "os.environ['HF_HOME'] = '/tmp/elsewhere'\n"
        "from accelerate import Accelerator\n"
        "import huggingface_hub.constants, hf_ga\n"
        "assert huggingface_hub.constants.HF_HOME == '/tmp/elsewhere'\n"
        "assert isinstance(Accelerator(cpu=True), hf_ga.Accelerator)\n"
    )
    done = python(*RUN, script)
    assert done.returncode == 0, done.stderr
