"""A run with compiled layers and dropout is stopped, and goes on compiled or not."""

from functools import partial

import pytest
import torch
from runs import relative_distance, train
from stops import interrupted
from torch._dynamo.utils import counters

from hf_ga.finetuning.run import build
from hf_ga.rows.compiling import compile_layers

STOP = 3  # windows before the run is stopped: one checkpoint


@pytest.mark.slow("compiles layers")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's tracing looks at it
def test_a_stopped_run_with_compiled_layers_goes_on(place, undisturbed, tmp_path, monkeypatch):
    """The undisturbed run is not compiled. Control: another seed is another run. Not with inductor,
    which compiles C++ for minutes: tests/rows/test_compiled_dropout.py.
    """
    monkeypatch.setattr(build, "compile_layers", partial(compile_layers, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    interrupted(place, tmp_path / "out", STOP + 1, torch_compile=True)
    assert counters["stats"]["unique_graphs"], "the layers were compiled"
    for name, is_compiled in (("compiled", True), ("plain", False)):
        train(
            place,
            tmp_path / name,
            torch_compile=is_compiled,
            resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{STOP}"),
        )
        assert relative_distance(tmp_path / name, undisturbed[1]) < 5e-5
    train(place, tmp_path / "other", seed=8)
    assert relative_distance(tmp_path / "other", undisturbed[1]) > 1e-3
