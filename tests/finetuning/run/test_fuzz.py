"""Configuration files that nobody would think of: the same few examples in every run."""

import json
from dataclasses import fields

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import hf_ga
from hf_ga.finetuning.run.flags.cli import parse_config
from hf_ga.finetuning.run.flags.config import FinetuneConfig


def fuzz(examples: int) -> settings:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=quiet,
    )


NAMES = [field.name for field in fields(FinetuneConfig)]
# Without surrogates, which no UTF-8 file can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WORDS = [
    "auto",
    "none",
    "1e-4",
    "nan",
    "-1",
    "--seed",
    "=",
    "%s",
    "{}",
    "yes",
    "causal-lm",
    "0x10",
    "1_000",
    "٣",
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.sampled_from(WORDS)
)
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
DOCUMENTS = st.dictionaries(st.sampled_from(NAMES) | TEXT, NESTED, max_size=5)
VALID = (
    "task: causal-lm\nlearning_rate: 1e-4\nmax_steps: 3\nfreeze: [a, b]\nseed: 7\ndeterministic: "
    "true\noutput_dir: out\n"
)


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
        text = (
            json.dumps(document)
            if ending == "json"
            else yaml.safe_dump(document, allow_unicode=True)
        )
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
    changed = st.builds(
        mutated,
        base,
        st.integers(0, 300),
        st.integers(0, 6),
        st.binary(max_size=4) | TEXT.map(str.encode),
    )

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
    with pytest.raises(
        hf_ga.ConfigError, match=r"run.yaml is malformed: could not determine a constructor"
    ):
        parse_config([str(tmp_path / "run.yaml")])
    assert not (tmp_path / "made").exists()
    yaml.unsafe_load((tmp_path / "run.yaml").read_text())
    assert (tmp_path / "made").exists()
