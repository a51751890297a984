"""Plans, configuration files and dataset rows that nobody would think of.

The normal run draws the same few examples every time; `--full` draws 20 times as many, others in each run.
"""

import json
import math
import string
from dataclasses import fields

import datasets
import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_bad_rows import fitting

import hf_ga
from hf_ga.data import corpus
from hf_ga.data.data import prepare_data, prepare_unlabelled
from hf_ga.data.tasks import TASKS
from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.exact.length_plan import plan_by_length
from hf_ga.exact.plan import check_plan, plan_by_sizes, plan_window
from hf_ga.run.cli import parse_config
from hf_ga.run.config import FinetuneConfig


@pytest.fixture
def fuzz():
    """Number of examples -> settings."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

    def chosen(examples: int) -> settings:
        return settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=quiet,
        )

    return chosen


# Plan

PLANNERS = {
    "by count": lambda lengths, processes, limit: plan_window(len(lengths), processes, limit),
    "by length": lambda lengths, processes, limit: plan_by_length(lengths % 2**20, processes, limit),  # no sample is longer
    "by sizes": lambda lengths, processes, limit: plan_by_sizes(lengths, processes, [limit, 1 + limit // 2]),
}
LENGTHS = st.lists(st.integers(0, 2**62), max_size=120)
SIZES = st.one_of(st.integers(1, 9), st.integers(1, 2**40))


@pytest.mark.parametrize("name", PLANNERS)
def test_plan(name, fuzz):
    @fuzz(60)
    @given(LENGTHS, st.integers(1, 130), SIZES)
    def check(lengths, processes, limit):
        lengths = np.array(lengths, np.int64)
        plan = PLANNERS[name](lengths, processes, limit)
        again = PLANNERS[name](lengths.copy(), processes, limit)
        assert sorted(int(o) for share in plan for m in share for o in m) == list(range(len(lengths)))
        assert all(1 <= len(m) <= limit for share in plan for m in share) and len(plan) == processes
        assert [[m.tolist() for m in share] for share in plan] == [[m.tolist() for m in share] for share in again]
        check_plan(plan, len(lengths), processes)
        if name == "by count":
            shares = [sum(map(len, share)) for share in plan]
            assert max(shares) - min(shares) <= 1
            assert all(len(share) == -(-size // limit) for share, size in zip(plan, shares, strict=True))

    check()


# Configuration files

NAMES = [field.name for field in fields(FinetuneConfig)]
# Without surrogates, which no UTF-8 file can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.sampled_from(
        ["auto", "none", "all", "1e-4", "nan", "-1", "--seed", "=", "%s", "{}", "yes", "causal-lm", "0x10", "1_000", "٣"]
    ),
)
NESTED = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6)
DOCUMENTS = st.dictionaries(st.sampled_from(NAMES) | TEXT, NESTED, max_size=5)
VALID = "task: causal-lm\nlearning_rate: 1e-4\nmax_steps: 3\nfreeze: [a, b]\nseed: 7\ndeterministic: true\noutput_dir: out\n"


def config_or_error(path) -> None:
    """A configuration whose flags have their types, or one clear error."""
    try:
        config = parse_config([str(path)])
        config.check()
    except hf_ga.ConfigError as error:
        assert str(error).strip()
    else:
        json.dumps(config.to_dict())


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_documents(ending, fuzz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"run.{ending}"

    @fuzz(60)
    @given(DOCUMENTS | NESTED)
    @example({"report_to": {"a": 1}})
    @example({"seed": 10**400})
    def check(document):
        text = json.dumps(document) if ending == "json" else yaml.safe_dump(document, allow_unicode=True)
        path.write_text(text, encoding="utf-8")
        config_or_error(path)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_values_of_every_flag(name, fuzz, tmp_path, monkeypatch):
    """In a file, and in Python, where nothing has parsed them."""
    monkeypatch.chdir(tmp_path)

    @fuzz(4)
    @given(NESTED)
    @example([])
    @example({"a": 1})
    @example(math.nan)
    @example("")
    @example("\0")
    @example(1.5)
    @example(True)
    def check(value):
        (tmp_path / "run.json").write_text(json.dumps({name: value}))
        config_or_error(tmp_path / "run.json")
        try:
            FinetuneConfig(**{name: value}).check()
        except hf_ga.ConfigError as error:
            assert str(error).strip()

    check()


def test_bytes_and_mutations(fuzz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def mutated(base: bytes, at: int, cut: int, put: bytes) -> bytes:
        at %= len(base) + 1
        return base[:at] + put + base[at + cut :]

    as_json = json.dumps(yaml.safe_load(VALID)).encode()
    base = st.sampled_from([VALID.encode(), as_json])
    changed = st.builds(mutated, base, st.integers(0, 300), st.integers(0, 6), st.binary(max_size=4) | TEXT.map(str.encode))

    @fuzz(120)
    @given(st.binary(max_size=60) | changed, st.sampled_from(["run.yaml", "run.json"]))
    @example(b"[" * 100_000, "run.json")
    @example(b"[" * 3_000, "run.yaml")
    @example(b"a: &a [*a]", "run.yaml")
    @example(b"seed: &a {b: *a}", "run.yaml")
    @example(b"1: 2\nnull: 3", "run.yaml")
    @example(b"? [1, 2]\n: 3", "run.yaml")
    @example(b"seed: 2001-01-01", "run.yaml")
    @example(b"seed: !!binary aGk=", "run.yaml")
    @example(b"freeze: !!set {a, b}", "run.yaml")
    @example(b"seed: 1\nseed: 2", "run.yaml")
    @example(b'{"seed": 1, "seed": 2}', "run.json")
    @example(b"--- \nseed: 1\n---\nseed: 2", "run.yaml")
    @example(b"seed: " + b"9" * 5000, "run.yaml")
    @example(b'{"seed": ' + b"9" * 5000 + b"}", "run.json")
    def check(content, name):
        (tmp_path / name).write_bytes(content)
        config_or_error(tmp_path / name)

    check()


@pytest.mark.parametrize("tag", ["object/apply:os.mkdir", "object/new:os.mkdir", "name:os.mkdir", "module:os", "object/apply:eval"])
def test_no_code_in_a_file(tag, tmp_path, monkeypatch):
    """With the control that the document does run code where it is loaded carelessly."""
    monkeypatch.chdir(tmp_path)
    argument = "\"__import__('os').mkdir('made')\"" if tag.endswith("eval") else "made"
    text = f"seed: !!python/{tag}" + (f" [{argument}]" if "object" in tag else " ''")
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(hf_ga.ConfigError, match=r"run.yaml is malformed: could not determine a constructor"):
        parse_config([str(tmp_path / "run.yaml")])
    assert not (tmp_path / "made").exists()
    if "object/apply" in tag:
        yaml.unsafe_load(text)
        assert (tmp_path / "made").exists()


# Rows

ODD = st.sampled_from(
    [
        "",
        " ",
        "\0",
        "\u200b",
        "\ud800",
        "a\udfff",
        "\n",
        "\x1b[0m",
        "<eos>",
        "<pad>",
        "<mask>",
        "é" * 40,
        "0",
        "1.5",
        "null",
        "a " * 90,
    ]
)
NUMBERS = st.sampled_from([0, 1, -1, -100, 2**31, 2**63, 10**30, 10**400, 0.5, 1.0, 1e39, math.nan, math.inf, True, False, 10**12])
LEAVES = st.one_of(st.none(), NUMBERS, ODD, st.text(string.printable, max_size=8))
KEYS = st.sampled_from(["text", "answer_start", "label", "role", "content", "a"])
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=5)
KINDS = sorted(fitting(0))
assert {kind.partition(",")[0] for kind in KINDS} == set(TASKS)


def tokenizer_for(kind: str):
    tokenizer = corpus.train_tokenizer(["some words to learn on", "what is it"], 300)
    if "conversations" in kind:
        tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    return tokenizer


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def check_batch(data, kind: str) -> None:
    """One batch of each split: token ids in the vocabulary, labels in range, numbers finite."""
    for split, dataset in data.splits.items():
        samples = data.samples(split)
        batch = data.collate([samples[i] for i in range(min(4, len(dataset)))])
        ids, size = batch["input_ids"], len(data.tokenizer)
        assert ids.dtype == torch.int64 and int(ids.min()) >= 0 and int(ids.max()) < size
        assert batch["attention_mask"].shape == ids.shape
        labels = batch.get("labels")
        if labels is None:
            assert kind.startswith("question")
            assert int(batch["start_positions"].min()) >= 0 and int(batch["end_positions"].max()) < ids.shape[1]
            assert (batch["start_positions"] <= batch["end_positions"]).all()
        elif labels.is_floating_point():
            assert labels.isfinite().all()
        else:
            limit = {"class": len(data.labels), "tags": len(data.labels), "choice": ids.shape[1]}.get(data.task.labels, size)
            used = labels[labels != IGNORED_LABEL]
            assert not len(used) or (int(used.min()) >= 0 and int(used.max()) < limit)


def prepared_or_error(text: str, kind: str, folder, tokenizer, number: list[int], **more) -> bool:
    """Whether the rows were taken. `number` gives every file a name of its own."""
    number[0] += 1
    file = folder / f"{number[0]}.jsonl"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    config = FinetuneConfig(task=kind.partition(",")[0], dataset_name=str(file), max_length=16, **more)
    try:
        data = prepare_data(config, tokenizer)
        check_batch(data, kind)
        if data.stream is not None:
            assert sum(1 for _ in data.stream) >= len(data.splits["train"])
        if data.task.labels != "none":
            prepare_unlabelled(config, data, str(file))
    except (hf_ga.DataError, hf_ga.ConfigError) as error:
        assert str(error).strip()
        return False
    return True


def rows_of(kind: str):
    """Eight good rows, in some of which something is something else."""

    def changed(changes) -> str:
        rows = [fitting(number)[kind] for number in range(8)]
        for at, column, value, is_gone in changes:
            name = sorted(rows[at])[column % len(rows[at])] if rows[at] else "text"
            rows[at] = {k: v for k, v in rows[at].items() if k != name} if is_gone else {**rows[at], name: value}
        return "".join(json.dumps(row) + "\n" for row in rows)

    change = st.tuples(st.integers(0, 7), st.integers(0, 5), VALUES, st.booleans())
    return st.lists(change, min_size=1, max_size=3).map(changed)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, fuzz, tmp_path):
    tokenizer, number = tokenizer_for(kind), [0]
    good = "".join(json.dumps(fitting(n)[kind]) + "\n" for n in range(8))
    assert prepared_or_error(good, kind, tmp_path, tokenizer, number)  # the control: not all is refused

    @fuzz(16)
    @given(rows_of(kind))
    def check(text):
        prepared_or_error(text, kind, tmp_path, tokenizer, number)

    check()


@pytest.mark.usefixtures("quiet")
def test_files_of_rows(fuzz, tmp_path):
    """Bytes of a good file, changed, cut or put in anywhere."""
    kind, number = "text-classification", [0]
    tokenizer = tokenizer_for(kind)
    good = "".join(json.dumps(fitting(n)[kind]) + "\n" for n in range(8)).encode()

    @fuzz(30)
    @given(
        st.integers(0, len(good)),
        st.integers(0, 30),
        st.binary(max_size=4) | st.sampled_from([b"\n", b"[1]\n", b"\xff"]),
    )
    def check(at, cut, put):
        text = (good[:at] + put + good[at + cut :]).decode("utf-8", "surrogateescape")
        number[0] += 1
        file = tmp_path / f"bytes{number[0]}.jsonl"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        try:
            check_batch(prepare_data(FinetuneConfig(task=kind, dataset_name=str(file), max_length=16), tokenizer), kind)
        except (hf_ga.DataError, hf_ga.ConfigError) as error:
            assert str(error).strip()

    check()
