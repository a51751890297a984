"""What a check hands out: text, dict, files, HTML, and the command line."""

import html
import json
import math
import re
import runpy
import sys
from html.parser import HTMLParser

import helpers
import pytest
from check_equivalence import CheckConfig, main

import hf_ga
from hf_ga.check.report import EquivalenceReport
from hf_ga.check.rows import OURS, Cause, Row, sizes_text
from hf_ga.run.cli import parse_config


def mean_of_means(model, micro_batches):
    for batch in micro_batches:
        (model(**batch).loss / len(micro_batches)).backward()


@pytest.fixture(scope="module")
def report():
    model = helpers.bert_masked_lm(0.0)
    layouts = ["even", "short last window"]
    return hf_ga.check_equivalence(model, helpers.token_samples(12), helpers.pad_right, layouts, steps={"a <loop>": mean_of_means})


def test_the_text_has_the_verdict_first_and_every_row(report):
    lines = str(report).splitlines()
    assert lines[0] == "BertForMaskedLM"
    assert lines[1].startswith("hf_ga: passed, same gradient as the full batch in all 2 layouts (largest relative error ")
    assert lines[2].startswith("a <loop>: FAILED in 2 of 2 layouts")
    assert lines[3].startswith("  cause: normalisation: mean of means")
    assert sum(line.endswith(("passed", "FAILED")) for line in lines[4:]) == 4
    assert any("in float64" in line for line in lines)


def test_passed_worst_and_max_error(report):
    assert not report.passed and report.arm(OURS).passed
    errors = {(row.arm, row.layout): row.error for row in report.rows}
    assert report.max_error == max(errors.values()) == report.worst.error
    assert report.worst.arm == "a <loop>" and report.arm(OURS).max_error < 1e-6


def test_the_dict_is_json_and_holds_every_figure(report, tmp_path):
    report.save(tmp_path)
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert read == json.loads(json.dumps(report.to_dict()))
    assert read["passed"] is False and read["worst"]["arm"] == "a <loop>"
    assert [row["error"] for row in read["rows"]] == [row.error for row in report.rows]
    assert read["reasons"][OURS] == [] and "mean of means" in read["reasons"]["a <loop>"][0]
    assert set(read["rows"][0]["parameter_errors"]) == {n for n, _ in helpers.bert_masked_lm().named_parameters()}
    assert read["versions"]["torch"] and read["settings"]["precision"] == "fp32"


class Checked(HTMLParser):
    """Balanced tags, and what a page would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone(report, tmp_path):
    report.save(tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Checked(text)
    assert not page.open and "script" not in page.tags and page.tags.count("img") == 1
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://", text)
    assert html.escape(str(report)) in text and "a &lt;loop&gt;" in text and "<loop>" not in text
    assert "color-scheme" in text and "background: white" in text


def test_the_notebooks_fragment_is_no_page(report):
    text = report._repr_html_()
    page = Checked(text)
    assert not page.open and "html" not in page.tags and page.tags.count("img") == 1


def test_a_refusal_is_the_verdict():
    rows = [Row(OURS, "even", [2, 2], 2, refused="no <rule> fits", causes=[Cause("BatchNorm", "it mixes", "error 1e-1")])]
    refused = EquivalenceReport("Model", rows, ["a fact"], {}, {})
    assert not refused.passed and refused.max_error == math.inf and refused.to_dict()["max_error"] is None
    assert refused.verdict(OURS) == "refused: no <rule> fits"
    assert refused.reasons(OURS) == ["BatchNorm: it mixes (even; error 1e-1)"]
    text = refused._repr_html_()
    assert "refused" in str(refused) and "no &lt;rule&gt; fits" in text
    assert "img" not in Checked(text).tags  # there is nothing to plot


def test_sizes_are_written_short():
    assert [sizes_text(sizes) for sizes in ([4, 4], [12, 4], [7], list(range(1, 9)))] == [
        "2 x 4",
        "12 + 4",
        "7",
        "1 + 2 + 3 + 4 + 5 + 6 + ...",
    ]


FLAGS = ["--task", "text-classification", "--max_length", "24", "--per_device_train_batch_size", "2"]


def test_the_script_writes_its_report_and_asserts(tmp_path, capsys):
    folder = tmp_path / "check"
    flags = [*FLAGS, "--compare", "none", "--check_layouts", "even,uneven", "--assert", "--output_dir", str(folder)]
    assert main(flags) == 0
    read = json.loads((folder / "report.json").read_text())
    assert read["passed"] and [row["layout"] for row in read["rows"]] == ["even", "uneven"]
    assert sum(read["rows"][0]["micro_batches"]) == 8  # 2 x 4, the window of these flags
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json"]
    assert "BertForSequenceClassification\nhf_ga: passed" in capsys.readouterr().out


def test_quick_takes_16_samples_in_three_layouts(tmp_path):
    flags = [*FLAGS, "--per_device_train_batch_size", "8", "--quick", "--compare", "none", "--output_dir", str(tmp_path)]
    assert main(flags) == 0
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["layout"] for row in rows] == ["uneven", "one by one", "short last window"]
    assert rows[1]["micro_batches"] == [1] * 16


def test_another_loss_is_compared_with_nothing(tmp_path):
    layouts = ["--check_layouts", "uneven", "--label_smoothing_factor", "0.1"]
    assert main([*FLAGS, *layouts, "--output_dir", str(tmp_path)]) == 0
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["passed"] and [row["arm"] for row in read["rows"]] == [OURS] and "no other step is compared" in read["facts"][-1]


def test_assert_is_about_hf_ga_and_fails_where_it_does(tmp_path, monkeypatch, capsys):
    flags = [*FLAGS, "--compare", "accelerate", "--check_layouts", "uneven", "--assert", "--output_dir", str(tmp_path)]
    assert main(flags) == 0
    assert "accelerate loop: FAILED" in capsys.readouterr().out
    monkeypatch.setattr("hf_ga.check.judging.TIMES_OWN_ERROR", 0.0)
    monkeypatch.setattr("hf_ga.check.judging.FLOOR", 0.0)  # nothing is exact to the last bit
    assert main([*flags, "--compare", "none"]) == 1


BAD = {
    "unknown arm": (["--compare", "lightning"], "compare must name some of trainer, accelerate, got 'lightning'"),
    "unknown layout": (["--check_layouts", "even,odd"], "check_layouts must name some of even"),
    "misspelt flag": (["--check_layout", "even"], "unknown flag --check_layout. Did you mean --check_layouts?"),
    "of finetune": (["--task", "poetry"], "unknown task 'poetry'"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_one_line_and_exit_code_2(case, capsys, tmp_path):
    flags, message = BAD[case]
    assert main([*flags, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()


def test_the_flags_of_finetune_come_from_its_file_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("task: masked-lm\nlearning_rate: 0.001\ncheck_layouts: even\n")
    config = parse_config([str(path), "--quick"], CheckConfig)
    assert (config.task, config.quick, config.check_layouts, config.output_dir) == ("masked-lm", True, "even", "outputs/check")


def test_the_script_lists_its_flags(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_equivalence.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path("scripts/check_equivalence.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ") and "--check_layouts" in printed and "--assert" in printed
