"""Configuration files and dataset rows that nobody would think of: the same few examples in every run."""

import json
import math
import string
from dataclasses import fields

import datasets
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
from hf_ga.run.cli import parse_config
from hf_ga.run.config import FinetuneConfig


def fuzz(examples: int) -> settings:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)


NAMES = [field.name for field in fields(FinetuneConfig)]
# Without surrogates, which no UTF-8 file can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WORDS = ["auto", "none", "1e-4", "nan", "-1", "--seed", "=", "%s", "{}", "yes", "causal-lm", "0x10", "1_000", "٣"]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.sampled_from(WORDS))
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
def test_documents(ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"run.{ending}"

    @fuzz(30)
    @given(DOCUMENTS | NESTED)
    @example({"report_to": {"a": 1}})
    @example({"seed": 10**400})
    @example({"learning_rate": 10**400})
    @example({"output_dir": "\0"})
    @example({"freeze": []})
    def check(document):
        text = json.dumps(document) if ending == "json" else yaml.safe_dump(document, allow_unicode=True)
        path.write_text(text, encoding="utf-8")
        config_or_error(path)

    check()


def test_bytes_and_mutations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def mutated(base: bytes, at: int, cut: int, put: bytes) -> bytes:
        at %= len(base) + 1
        return base[:at] + put + base[at + cut :]

    as_json = json.dumps(yaml.safe_load(VALID)).encode()
    base = st.sampled_from([VALID.encode(), as_json])
    changed = st.builds(mutated, base, st.integers(0, 300), st.integers(0, 6), st.binary(max_size=4) | TEXT.map(str.encode))

    @fuzz(30)
    @given(st.binary(max_size=60) | changed, st.sampled_from(["run.yaml", "run.json"]))
    @example(b"[" * 100_000, "run.json")
    @example(b"[" * 1_200, "run.yaml")  # more than may be nested
    @example(b"1: 2\nnull: 3", "run.yaml")
    @example(b"seed: 2001-01-01", "run.yaml")
    @example(b"freeze: !!set {a, b}", "run.yaml")
    @example(b"--- \nseed: 1\n---\nseed: 2", "run.yaml")
    @example(b'{"seed": ' + b"9" * 5000 + b"}", "run.json")
    def check(content, name):
        (tmp_path / name).write_bytes(content)
        config_or_error(tmp_path / name)

    check()


def test_no_code_in_a_file(tmp_path, monkeypatch):
    """With the control that the document does run code where it is loaded carelessly."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("seed: !!python/object/apply:os.mkdir [made]")
    with pytest.raises(hf_ga.ConfigError, match=r"run.yaml is malformed: could not determine a constructor"):
        parse_config([str(tmp_path / "run.yaml")])
    assert not (tmp_path / "made").exists()
    yaml.unsafe_load((tmp_path / "run.yaml").read_text())
    assert (tmp_path / "made").exists()


ODD = st.sampled_from(
    ["", " ", "\0", "\u200b", "\ud800", "\n", "\x1b[0m", "<eos>", "<pad>", "<mask>", "é" * 40, "0", "null", "a " * 90]
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
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


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


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, tmp_path):
    tokenizer, number = tokenizer_for(kind), [0]
    good = "".join(json.dumps(fitting(n)[kind]) + "\n" for n in range(8))
    assert prepared_or_error(good, kind, tmp_path, tokenizer, number)  # the control: not all is refused

    @fuzz(4)
    @given(rows_of(kind))
    def check(text):
        prepared_or_error(text, kind, tmp_path, tokenizer, number)

    check()
