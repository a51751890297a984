"""`check_equivalence(whole_batch=...)`: its row passes, and negatives of micro-batches do not."""

import helpers as h
import pairs
import pytest

from hf_ga import ConfigError, check_equivalence
from hf_ga.check.arms import backward_arm


def contrast(outputs, batch):
    return pairs.contrast(outputs["anchor"], outputs["positive"], outputs["scale"])


def naive(model, micro_batches):
    """The mean of the losses of the micro-batches, as by usual gradient accumulation."""
    for batch in micro_batches:
        batch = {name: value for name, value in batch.items() if name != "label"}
        (contrast(model(**batch), batch) / len(micro_batches)).backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_contrastive_loss(precision):
    model = pairs.embedder(returns_scale=True)
    report = check_equivalence(
        model,
        pairs.pair_samples(16),
        pairs.collate_pairs,
        whole_batch=contrast,
        precision=precision,
        steps={"naive": naive} if precision == "fp32" else {},
    )
    ours = [row for row in report.rows if row.arm != "naive"]
    assert all(row.passed for row in ours), report
    others = [row for row in report.rows if row.arm == "naive" and len(row.micro_batches) > 1]
    assert not any(row.passed for row in others)


@pytest.mark.parametrize("size", [1, 5, 16])
def test_one_call_for_a_batch(size):
    """`hf_ga.backward` has the masks of the window's samples; with another seed it has others."""
    samples = h.token_samples(16)
    steps = {"hf_ga.backward": backward_arm(size)}
    one_batch = {"one batch": [16]}
    report = check_equivalence(h.gpt2(0.1), samples, h.pad_right, one_batch, steps)
    assert report.passed, report
    report = check_equivalence(h.gpt2(0.1), samples, h.pad_right, one_batch, steps, seed=1)
    assert not next(row for row in report.rows if row.arm == "hf_ga.backward").passed
    report = check_equivalence(h.gpt2(0.1), samples, h.pad_right, {"two": [8, 8]}, steps)
    refused = next(row for row in report.rows if row.arm == "hf_ga.backward").refused
    assert "takes one batch" in refused


def test_a_parameter_outside_of_the_copy_is_refused():
    model = pairs.embedder()
    with pytest.raises(ConfigError, match="let the model return it"):
        check_equivalence(
            model, pairs.pair_samples(16), pairs.collate_pairs, whole_batch=pairs.info_nce(model)
        )
