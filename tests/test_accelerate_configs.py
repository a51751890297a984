"""Each launch profile is loaded by Accelerate's own parser, and every key in it is explained."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

PROFILES = sorted((Path(__file__).parent.parent / "accelerate_configs").glob("*.yaml"))


def test_there_are_profiles():
    assert {profile.stem for profile in PROFILES} >= {"cpu", "single_gpu"}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.stem)
def test_accelerate_loads_it(profile):
    """A key that Accelerate does not know raises there."""
    config = load_config_from_file(str(profile))
    assert config.num_processes == 1
    assert config.mixed_precision == "no"
    assert config.use_cpu == (profile.stem == "cpu")
