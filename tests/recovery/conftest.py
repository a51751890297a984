"""Tiny models and files for all runs of the room, and a run that nothing disturbed."""

import pytest
from runs import filled_place, train, without_curves


@pytest.fixture(autouse=True, scope="module")
def _no_curves():
    """Drawn in `test_full_disk`, where one has no room."""
    with without_curves():
        yield


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("place")) as folder:
        yield folder


@pytest.fixture(scope="session")
def undisturbed(place):
    """Its summary and its folder, with all three checkpoints."""
    return train(place, place / "undisturbed", save_total_limit=9), place / "undisturbed"
