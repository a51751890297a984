"""README and docs are true: their Python blocks run, their commands run (shortened), their flags
exist, and CI runs the test command.
"""

import json
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path

import accelerate
import command_lines
import helpers as h
import pytest
import torch
from documented_loop import reset_states
from forked import on_ranks, run_script, without_errors
from trainers import arguments, make_trainer, word_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer

import hf_ga
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.run.flags.arguments import SCRIPT_FLAGS

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = {path.stem: path.read_text() for path in FILES}
BLOCKS = {page: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for page, text in PAGES.items()}
COMMANDS = [
    line.partition("  #")[0].strip()
    for text in PAGES.values()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
]
PROSE = [
    re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in PAGES.items() if page != "log"
]
INLINE = [" ".join(code.split()) for text in PROSE for code in re.findall(r"`([^`]+)`", text)]


def starting(*words: str) -> list[str]:
    """Each command once."""
    return list(dict.fromkeys(line for line in COMMANDS if line.startswith(words)))


CHECKS = starting("python scripts/check_equivalence.py")
PLANS = starting("python scripts/plan_batch.py", "python scripts/submit_slurm.py")
LAUNCHES = [line.split("&& ")[-1] for line in COMMANDS if "accelerate launch" in line]
REPORTED = [
    line for line in LAUNCHES if "--push_to_hub" in line or "--report_to" in line
]  # in test_hub.py, test_trackers.py
RUNS = [
    line
    for line in LAUNCHES
    if line not in REPORTED and ("scripts/finetune.py" in line or "scripts/check_" in line)
]
RUNS = list(dict.fromkeys(RUNS))
OF_OTHER_PROGRAMS = {  # accelerate launch; pytest and ruff
    *(
        "--config_file",
        "--num_processes",
        "--mixed_precision",
        "--machine_rank",
        "--main_process_ip",
        "--cpu",
        "--quiet",
    ),
    *("--full", "--check", "--logdir", "--exclude"),
}
# Of these, in tests of their own: test_kill_test.py, test_benchmark.py, test_sweep.py,
# test_experiment.py, test_gpu_report.py.
ELSEWHERE = starting(
    *(
        f"python scripts/{name}.py"
        for name in ("kill_test", "benchmark", "sweep_heads", "gpu_report")
    )
)


def execute(block: str, capsys) -> tuple[dict, str]:
    names: dict = {"__name__": "snippet"}
    exec(compile(block, "docs", "exec"), names)
    return names, capsys.readouterr().out


def test_every_block_and_command_is_tried():
    assert {page: len(blocks) for page, blocks in BLOCKS.items() if blocks} == {
        "README": 2,
        "accelerator": 4,
        "backward": 1,
        "checker": 1,
        "finetune": 2,
        "library": 3,
        "pipeline": 2,
        "processes": 2,
        "trainer": 3,
        "whole_batch": 2,
    }
    tried = {*CHECKS, *PLANS, *ELSEWHERE, *RUNS, *REPORTED}
    assert {line for line in COMMANDS if line not in tried and "pip install" not in line} == set()


def test_commands_and_flags_in_the_text_exist():
    """Flags are those of the configuration (cli.md), of transformers' example scripts, of our
    scripts, and those of `accelerate launch` and pytest that are used here.
    """
    sources = "".join(path.read_text() for path in (ROOT / "scripts").rglob("*.py"))
    tables = PAGES["cli"].partition("## From an example script")[0]
    known = {
        *re.findall(r"--\w+", tables + sources),
        *(f"--{name}" for name in SCRIPT_FLAGS),
        *OF_OTHER_PROGRAMS,
    }
    used = {flag for text in [*COMMANDS, *INLINE] for flag in re.findall(r"(?<!\S)--\w+", text)}
    assert used - known == set()
    assert len(used) > 40
    named = {
        word
        for text in [*COMMANDS, *INLINE]
        for word in re.findall(r"(?:scripts|tests|accelerate_configs|notebooks)/[\w./]+", text)
    }
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


def test_the_demonstration_fails_and_then_passes(capsys):
    """A demonstration in which both arms agree, or none, would catch nothing."""
    reset_states()  # of another test's precision
    _, printed = execute(BLOCKS["README"][1], capsys)
    usual, ours = (
        float(value) for value in re.findall(r"relative error of the update (\S+)", printed)
    )
    assert usual > 0.1
    assert ours < 1e-6


def test_the_loop_over_windows_runs_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, printed = execute("".join(BLOCKS["library"][:2]), capsys)
    assert [int(n) for n in re.findall(r"(\d+) targets in the last window", printed)] == [4, 4]
    assert "same weights after resuming: True" in printed


def test_the_changed_lines_of_a_stock_loop_make_the_same_updates():
    """The diff is the only one of the README with `hf_ga.backward`: both of its sides are run."""
    diffs = re.findall(r"```diff\n(.*?)```", PAGES["README"], re.DOTALL)
    (lines,) = [diff.splitlines() for diff in diffs if "hf_ga.backward" in diff]
    batch = h.pad_right(h.token_samples(20))
    batches = [{name: value[i : i + 9] for name, value in batch.items()} for i in (0, 9, 18)]

    def weights(left_out: str) -> torch.Tensor:
        loop = "\n".join(line[1:] for line in lines if not line.startswith(left_out))
        model = h.gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"hf_ga": hf_ga, "model": model, "optimizer": optimizer, "loader": batches}
        exec(loop, names)
        assert float(names["loss"].detach()) > 0
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    before = torch.nn.utils.parameters_to_vector(h.gpt2().parameters()).detach()
    stock = weights("+") - before
    ours = weights("-") - before
    assert (ours - stock).norm() < 1e-5 * stock.norm()


def test_the_one_call_gives_the_same_loss_for_every_size(capsys):
    _, printed = execute(BLOCKS["backward"][0], capsys)
    losses = re.findall(r"loss (\S+)", printed)
    assert len(losses) == 3
    assert len(set(losses)) == 1


def weights_after_each_loop(micro_batch_size: int) -> list[torch.Tensor]:
    """Run the loops of docs/accelerator.md, in windows of 32 samples."""
    num_steps = 32 // micro_batch_size
    changes = {
        "batch_size=8": f"batch_size={micro_batch_size}",
        "steps=4": f"steps={num_steps}",
        "/ 4": f"/ {num_steps}",
        "% 4": f"% {num_steps}",
    }
    reset_states()
    torch.manual_seed(0)
    names: dict = {"__name__": "snippet"}
    weights = []
    for block in BLOCKS["accelerator"]:
        for text, change in changes.items():
            block = block.replace(text, change)
        exec(compile(block, "docs", "exec"), names)
        parameters = names["model"].parameters()
        weights.append(torch.nn.utils.parameters_to_vector(parameters).detach())
    return weights


def test_the_accelerate_loops_are_those_of_the_full_batch():
    split = weights_after_each_loop(8)
    whole = weights_after_each_loop(32)
    assert len(split) == 4
    for ours, expected in zip(split, whole, strict=True):
        assert (ours - expected).norm() < 1e-6 * expected.norm()


def test_accelerates_own_loops_are_not(monkeypatch):
    """The control, for noise in the loop and for means with targets of their own. In the other
    loops each sample is one target, and torch draws dropout in the order of the samples.
    """
    monkeypatch.setattr(hf_ga, "Accelerator", accelerate.Accelerator)
    split = weights_after_each_loop(8)
    whole = weights_after_each_loop(32)
    for theirs, expected in zip(split[1:3], whole[1:3], strict=True):
        assert (theirs - expected).norm() > 1e-4 * expected.norm()


@pytest.mark.slow("starts processes")
def test_the_pipeline_runs_and_goes_on_without_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def work() -> tuple[int, int]:
        names: dict = {"__name__": "snippet"}
        exec("".join(BLOCKS["pipeline"]), names)
        return names["pipeline"].stage, names["windows"].epoch

    assert without_errors(on_ranks(work, 2)) == [(0, 1), (1, 1)]


@pytest.mark.slow("trains a model")
def test_a_file_of_ones_own_becomes_a_classifier(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "load_stdlib_tokenizer", cache(corpus.load_stdlib_tokenizer))
    script = "".join(BLOCKS["finetune"])
    assert script.count("max_steps=30") == 2
    assert script.count("eval_steps=15") == 1
    shorter = script.replace("max_steps=30", "max_steps=16").replace(
        "eval_steps=15", "eval_steps=8"
    )
    names, printed = execute(shorter, capsys)
    assert "[{'label': '1', 'score':" in printed
    assert printed.count("{'eval_weighted_f1': ") == 3
    assert names["summary"]["best_eval_weighted_f1"] > 0.5


def test_the_main_process_builds_a_model_with_weights(capsys):
    names, _ = execute(BLOCKS["processes"][0], capsys)
    assert not any(parameter.is_meta for parameter in names["model"].parameters())


def test_the_stream_gives_windows(capsys):
    _, printed = execute(BLOCKS["processes"][1], capsys)
    assert printed == "[32, 32, 32, 4]\n"


@pytest.mark.parametrize(("page", "index"), [("README", 0), ("trainer", 0)])
def test_the_one_import_line_gives_a_trainer(page, index, capsys):
    names, _ = execute(BLOCKS[page][index], capsys)
    assert issubclass(names["Trainer"], Trainer)
    assert names["Trainer"] is not Trainer


def test_the_weighted_loop_runs(capsys):
    """Windows of 32 rows, the last of 8, whose weights are 1, 2 and 3 in turn."""
    names, printed = execute(BLOCKS["library"][2], capsys)
    sums = [float(number) for number in re.findall(r"sum of weights (\S+)", printed)]
    rows = names["rows"]
    weights = [row["weight"] * (20 if row["labels"] else 1) for row in rows]
    assert len(sums) == 7
    assert sum(sums) == pytest.approx(sum(weights))


def test_the_weighted_trainer_trains(tmp_path, capsys):
    import_line, _, weighted = BLOCKS["trainer"]
    names, _ = execute(import_line + weighted, capsys)
    rows = [{**row, "labels": i % 2} for i, row in enumerate(h.class_samples(16))]
    first = h.bert_classifier(num_labels=2)
    weights = {}
    for layout in ((4, 4), (16, 1)):
        case = {"model": h.copy.deepcopy(first), "samples": rows, "data_collator": h.pad_right}
        args = arguments(tmp_path, layout, max_steps=1)
        trainer = make_trainer(names["WeightedTrainer"], args=args, **case)
        trainer.train()
        parameters = torch.nn.utils.parameters_to_vector(trainer.model.parameters())
        weights[layout] = parameters.detach()
    before = torch.nn.utils.parameters_to_vector(first.parameters()).detach()
    learnt = (weights[16, 1] - before).norm()
    assert learnt > 0
    assert (weights[4, 4] - weights[16, 1]).norm() < 1e-5 * learnt


CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


@pytest.fixture
def small_qwen(tmp_path, monkeypatch):
    """A small model in a folder with the name of the one in docs/trainer.md, as if downloaded."""
    monkeypatch.chdir(tmp_path)
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([str(number) for number in range(41)])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained("Qwen/Qwen3-0.6B")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained("Qwen/Qwen3-0.6B")


def trained_on_chats(changes: dict[str, str], capsys) -> Trainer:
    """Run the script of docs/trainer.md on a CPU, with some of its text changed."""
    reset_states()
    torch.manual_seed(0)
    script = BLOCKS["trainer"][1]
    folder = 'output_dir="outputs/chats",'
    on_a_cpu = {folder: folder + " use_cpu=True, dataloader_pin_memory=False,"}
    for text, change in (changes | on_a_cpu).items():
        assert text in script
        script = script.replace(text, change)
    names, _ = execute(script, capsys)
    return names["trainer"]


def num_packed(trainer: Trainer) -> int:
    """How many micro-batches were packed."""
    return trainer._window.engine.speed_ups.num_used.get("packing", 0)


@pytest.mark.slow("trains with TRL")
def test_the_chats_are_packed_without_trls_packing(small_qwen, capsys):
    """Windows of 16, 16 and 8 chats; those of the first epoch are rehearsed, so not packed. The
    control is TRL's own loss, which no speed-up serves.
    """
    trainer = trained_on_chats({}, capsys)
    assert num_packed(trainer) == 4 + 4 + 2
    assert Path("outputs/chats/adapter_model.safetensors").exists()
    own_loss = "compute_loss = Trainer.compute_loss"
    assert num_packed(trained_on_chats({own_loss: "pass"}, capsys)) == 0
    with pytest.raises(hf_ga.ConfigError, match="packing"):
        trained_on_chats({"bf16=True": "bf16=True, packing=True"}, capsys)


@pytest.mark.slow("trains with TRL")
def test_the_chats_make_the_same_updates_in_every_layout(small_qwen, capsys):
    """Packed, with dropout. The control is TRL without the mixin, whose dropout depends on the
    layout.
    """
    float32 = {"bf16=True": "bf16=False, max_grad_norm=0.0", "2e-4": '0.5, optim="sgd"'}
    full_batch = {"batch_size=4": "batch_size=16", "steps=4": "steps=1"}
    plain = {"ExactTrainerMixin, SFTTrainer": "SFTTrainer", "epochs=2": "epochs=1"}

    def adapters(changes):
        trainer = trained_on_chats(float32 | changes, capsys)
        trainable = [p for p in trainer.model.parameters() if p.requires_grad]
        return {"": torch.nn.utils.parameters_to_vector(trainable).detach()}

    assert h.relative_error(adapters({}), adapters(full_batch)) < 1e-5
    assert h.relative_error(adapters(plain), adapters(plain | full_batch)) > 1e-4


@pytest.mark.slow("checks two steps in all layouts")
def test_the_check_convicts_the_step_and_acquits_ours(capsys):
    names, printed = execute(BLOCKS["checker"][0], capsys)
    assert "hf_ga: passed" in printed
    assert "mine: FAILED" in printed
    assert "x4.00" in printed
    assert names["report"].arm("hf_ga").passed
    assert not names["report"].passed


SHORTER = {
    "finetune": "--max_steps 2 --max_length 16 --max_eval_samples 100 --max_predict_samples 100 "
    "--per_device_eval_batch_size 100",
    "check": "--quick --compare none --max_length 16",
}


def shortened(command: str) -> list[str]:
    """With paths from anywhere, a few steps and few tokens."""
    words = [
        str(ROOT / word) if word.startswith(("scripts/", "accelerate_configs/")) else word
        for word in shlex.split(command)
    ]
    words += SHORTER["check" if "scripts/check_" in command else "finetune"].split()
    if "scripts/finetune.py" in command and "text-classification" not in command:
        words += ["--max_train_samples", "200"]  # the first rows do not have all classes
    return words


@pytest.mark.slow("many runs")
def test_the_commands_run(tmp_path):
    """In one folder and in this order, as some resume, without importing everything for each; real
    launches are in promises.
    """
    commands = [*CHECKS, *RUNS]
    (tmp_path / "data").mkdir()
    for name in ("part-1", "part-2", "check", "notes"):
        (tmp_path / f"data/{name}.jsonl").write_text('{"text": "a note of five words"}\n' * 40)
    printed = run_script(command_lines.__file__, tmp_path, [*map(shortened, commands)])
    assert "hf_ga: passed" in printed
    assert (tmp_path / "outputs/check/report.html").exists()
    assert (tmp_path / "outputs/safe/summary.json").exists()
    assert "data/part-*.jsonl: 80 train, 80 validation rows" in printed
    assert "data/part-*.jsonl, data/notes.jsonl: " in printed
    assert (
        "2 processes" in json.loads((tmp_path / "outputs/two/summary.json").read_text())["layout"]
    )


def test_the_plans_are_printed(tmp_path, capsys, monkeypatch):
    """The exact layout with the lines that the docs show, and the batch script with the launch
    command of each node.
    """
    monkeypatch.chdir(tmp_path)
    printed = []
    for command in PLANS:
        _, script, *flags = shlex.split(command)
        monkeypatch.setattr(
            sys,
            "argv",
            [
                script,
                *(str(ROOT / flag) if flag.startswith("scripts/") else flag for flag in flags),
            ],
        )
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        printed.append(capsys.readouterr().out)
    shown = [
        line.strip() for line in PAGES["processes"].splitlines() if line.startswith("    samples ")
    ]
    assert len(shown) == 2
    assert set(shown) <= set(printed[0].splitlines())
    assert "#SBATCH" in printed[1] and "--num_processes 16" in printed[1]


def test_ci_runs_the_test_command():
    """What the README tells a newcomer to run is what continuous integration runs."""
    command = next(line for line in COMMANDS if "pytest" in line)
    ci = (ROOT / ".ci/run").read_text()
    for part in command.split(" && ")[2:]:
        assert part.removeprefix("pip install ") in ci, part


def test_links_lead_somewhere():
    """Relative links of README and docs."""
    for page, text in PAGES.items():
        folder = ROOT if page.isupper() else ROOT / "docs"
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert link.startswith("http") or (folder / link).exists(), f"{page}: {link}"


def test_the_main_command_comes_early():
    lines = PAGES["README"].splitlines()
    main = [i for i, line in enumerate(lines) if "accelerate launch scripts/finetune.py" in line]
    assert main[0] < 40
