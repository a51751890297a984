"""What all tests of data need: no progress bars, and a cache of datasets of their own."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
