"""`check_equivalence(whole_batch=...)`: its row passes, and negatives of micro-batches do not."""

import pairs
import pytest

from hf_ga import ConfigError, check_equivalence


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


def test_a_parameter_outside_of_the_copy_is_refused():
    model = pairs.embedder()
    with pytest.raises(ConfigError, match="let the model return it"):
        check_equivalence(
            model, pairs.pair_samples(16), pairs.collate_pairs, whole_batch=pairs.info_nce(model)
        )
