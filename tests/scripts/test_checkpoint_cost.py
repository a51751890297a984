"""scripts/checkpoint_cost.py with a small model."""

import checkpoint_cost
import pytest
from common import Shape


def test_costs_are_printed_beside_a_control(tmp_path, monkeypatch, capsys):
    small = Shape("gpt", layers=1, width=16, heads=2, words=50_000)
    monkeypatch.setattr(checkpoint_cost, "SHAPE", small)
    checkpoint_cost.measure(2, 8, tmp_path)
    out = capsys.readouterr().out
    assert out.count("control") == 3
    assert "cost of a checkpoint" in out
    # The weights, and AdamW's two moments of each.
    num_parameters = 50_000 * 16 + 1024 * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16
    written = int(out.split("bytes")[1].split()[0].replace(",", ""))
    assert written == pytest.approx(3 * 4 * num_parameters, rel=0.01)


def test_the_line_has_median_quartiles_and_mean():
    line = checkpoint_cost.describe("cost", [0.3, 0.6, 0.9])
    assert "0.60 s (0.30 to 0.90), mean 0.60 +- 0.17 s" in line
    assert "median 1.00% of a minute" in line
