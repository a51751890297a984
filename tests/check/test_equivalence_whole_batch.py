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


@pytest.mark.parametrize(("precision", "layouts"), [("fp32", "auto"), ("fp16", ["uneven"])])
def test_contrastive_loss(precision, layouts):
    model = pairs.embedder(returns_scale=True)
    report = check_equivalence(
        model,
        pairs.pair_samples(16),
        pairs.collate_pairs,
        layouts,
        whole_batch=contrast,
        precision=precision,
        steps={"naive": naive} if precision == "fp32" else {},
    )
    ours = [row for row in report.rows if row.arm != "naive"]
    assert all(row.passed for row in ours), report
    others = [row for row in report.rows if row.arm == "naive" and len(row.micro_batches) > 1]
    assert not any(row.passed for row in others)


def check_of_one_call(layouts, sizes=(5,), **more):
    """What an arm of `hf_ga.backward` for each size of micro-batches got."""
    steps = {f"by {size}": backward_arm(size) for size in sizes}
    samples = h.token_samples(16)
    report = check_equivalence(h.gpt2(0.1), samples, h.pad_right, layouts, steps, **more)
    return [row for arm in steps for row in report.arm(arm).rows]


@pytest.mark.slow("checks a step in all layouts")
def test_one_call_for_a_batch():
    """`hf_ga.backward` has the masks of the window's samples; with another seed it has others."""
    one_batch = {"one batch": [16]}
    rows = check_of_one_call(one_batch, sizes=(1, 5, 16))
    assert len(rows) == 3
    assert all(row.passed for row in rows), rows
    (with_another_seed,) = check_of_one_call(one_batch, seed=1)
    assert not with_another_seed.passed
    (of_two_batches,) = check_of_one_call({"two": [8, 8]})
    assert "takes one batch" in of_two_batches.refused


def test_a_parameter_outside_of_the_copy_is_refused():
    model = pairs.embedder()
    with pytest.raises(ConfigError, match="let the model return it"):
        check_equivalence(
            model, pairs.pair_samples(16), pairs.collate_pairs, whole_batch=pairs.info_nce(model)
        )
