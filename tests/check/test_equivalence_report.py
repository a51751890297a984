"""What a check hands out: text, dict, files, HTML, and the command line."""

import html
import json
import math
import re

import helpers
import pytest
from check_equivalence import main
from runs import filled_place

import hf_ga
from hf_ga.check.verdict.report import EquivalenceReport
from hf_ga.check.verdict.rows import OURS, Cause, ReportRow


def mean_of_means(model, micro_batches):
    for batch in micro_batches:
        (model(**batch).loss / len(micro_batches)).backward()


@pytest.fixture(scope="module")
def report():
    model = helpers.bert_masked_lm(0.0)
    layouts = ["even", "short last window"]
    return hf_ga.check_equivalence(
        model,
        helpers.token_samples(12),
        helpers.pad_right,
        layouts,
        steps={"a <loop>": mean_of_means},
    )


@pytest.fixture(scope="module")
def saved(report, tmp_path_factory):
    """The folder with its files."""
    folder = tmp_path_factory.mktemp("report")
    report.save(folder)
    return folder


def test_the_text_has_the_verdict_first_and_every_row(report):
    lines = str(report).splitlines()
    assert lines[0] == "BertForMaskedLM"
    assert lines[1].startswith(
        "hf_ga: passed, same gradient as the full batch in all 2 layouts (largest relative error "
    )
    assert lines[2].startswith("a <loop>: FAILED in 2 of 2 layouts")
    assert lines[3].startswith("  cause: normalisation: mean of means")
    assert sum(line.endswith(("passed", "FAILED")) for line in lines[4:]) == 4
    assert any("in float64" in line for line in lines)


def test_passed_worst_and_max_error(report):
    assert not report.passed
    assert report.arm(OURS).passed
    errors = {(row.arm, row.layout): row.error for row in report.rows}
    assert report.max_error == max(errors.values()) == report.worst.error
    assert report.worst.arm == "a <loop>"
    assert report.arm(OURS).max_error < 1e-6


def test_the_dict_is_json_and_holds_every_figure(report, saved):
    read = json.loads(
        (saved / "report.json").read_text(), parse_constant=pytest.fail
    )  # no NaN, no Infinity
    assert read == json.loads(json.dumps(report.to_dict()))
    assert read["passed"] is False
    assert read["worst"]["arm"] == "a <loop>"
    assert [row["error"] for row in read["rows"]] == [row.error for row in report.rows]
    assert read["reasons"][OURS] == []
    assert "mean of means" in read["reasons"]["a <loop>"][0]
    assert set(read["rows"][0]["parameter_errors"]) == {
        n for n, _ in helpers.bert_masked_lm().named_parameters()
    }
    assert read["versions"]["torch"]
    assert read["settings"]["precision"] == "fp32"


def test_the_page_stands_alone_and_the_notebooks_fragment_is_no_page(report, saved):
    page = (saved / "report.html").read_text()
    fragment = report._repr_html_()
    for text in (page, fragment):
        assert text.count("<img") == 1
        assert "<script" not in text
        assert not re.search(r"https?://", text)
        assert all(
            source.startswith("data:image/png;base64,")
            for source in re.findall(r'(?:src|href)="?([^">]*)', text)
        )
        assert all(text.count(f"<{tag}") == text.count(f"</{tag}>") for tag in ("pre", "div"))
    assert html.escape(str(report)) in page
    assert "a &lt;loop&gt;" in page
    assert "<loop>" not in page
    assert "color-scheme" in page
    assert "background: white" in page
    assert "<html" not in fragment


def test_a_refusal_is_the_verdict():
    rows = [
        ReportRow(
            OURS,
            "even",
            [2, 2],
            2,
            refused="no <rule> fits",
            causes=[Cause("BatchNorm", "it mixes", "error 1e-1")],
        )
    ]
    refused = EquivalenceReport("Model", rows, ["a fact"], {}, {})
    assert not refused.passed
    assert refused.max_error == math.inf
    assert refused.to_dict()["max_error"] is None
    assert refused.verdict(OURS) == "refused: no <rule> fits"
    assert refused.reasons(OURS) == ["BatchNorm: it mixes (even; error 1e-1)"]
    text = refused._repr_html_()
    assert "refused" in str(refused)
    assert "no &lt;rule&gt; fits" in text
    assert "<img" not in text  # there is nothing to plot


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a classification of small texts by a small BERT."""
    with filled_place(tmp_path_factory.mktemp("check")) as place:
        data = [
            "--dataset_name",
            str(place / "train.jsonl"),
            "--text_column",
            "text",
            "--label_column",
            "label",
        ]
        model = [
            "--task",
            "text-classification",
            "--model_name_or_path",
            str(place / "bert"),
            "--max_length",
            "24",
        ]
        yield [*model, *data, "--per_device_train_batch_size", "2"]


def test_the_script_writes_its_report_and_asserts(flags, tmp_path, capsys):
    folder = tmp_path / "check"
    more = [
        "--compare",
        "none",
        "--check_layouts",
        "even,uneven",
        "--assert",
        "--output_dir",
        str(folder),
    ]
    assert main([*flags, *more]) == 0
    read = json.loads((folder / "report.json").read_text())
    assert read["passed"]
    assert [row["layout"] for row in read["rows"]] == ["even", "uneven"]
    assert sum(read["rows"][0]["micro_batches"]) == 8  # 2 x 4, the window of these flags
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json"]
    assert "BertForSequenceClassification\nhf_ga: passed" in capsys.readouterr().out


def test_quick_takes_16_samples_in_three_layouts(flags, tmp_path):
    more = [
        "--per_device_train_batch_size",
        "8",
        "--quick",
        "--compare",
        "none",
        "--output_dir",
        str(tmp_path),
    ]
    assert main([*flags, *more]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["layout"] for row in rows] == ["uneven", "one by one", "short last window"]
    assert rows[1]["micro_batches"] == [1] * 16


def test_another_loss_is_compared_with_nothing(flags, tmp_path):
    layouts = ["--check_layouts", "uneven", "--label_smoothing_factor", "0.1"]
    assert main([*flags, *layouts, "--output_dir", str(tmp_path)]) == 0
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["passed"]
    assert [row["arm"] for row in read["rows"]] == [OURS]
    assert "no other step is compared" in read["facts"][-1]


@pytest.mark.slow("checks two steps in all layouts")
def test_assert_is_about_hf_ga_and_fails_where_it_does(flags, tmp_path, monkeypatch, capsys):
    flags = [*flags, "--check_layouts", "uneven", "--assert", "--output_dir", str(tmp_path)]
    assert main([*flags, "--compare", "accelerate"]) == 0
    assert "accelerate loop: FAILED" in capsys.readouterr().out
    monkeypatch.setattr("hf_ga.check.verdict.judging.TIMES_OWN_ERROR", 0.0)
    monkeypatch.setattr(
        "hf_ga.check.verdict.judging.FLOOR", 0.0
    )  # nothing is exact to the last bit
    assert main([*flags, "--compare", "none"]) == 1


BAD = {
    "unknown arm": (
        ["--compare", "lightning"],
        "compare must name some of trainer, accelerate, got 'lightning'",
    ),
    "unknown layout": (["--check_layouts", "even,odd"], "check_layouts must name some of even"),
    "misspelt flag": (
        ["--check_layout", "even"],
        "unknown flag --check_layout. Did you mean --check_layouts?",
    ),
    "of finetune": (["--task", "poetry"], "unknown task 'poetry'"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_one_line_and_exit_code_2(case, capsys, tmp_path):
    flags, message = BAD[case]
    assert main([*flags, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()
