"""The report row for `same_bits`: the gradient of a window must have the same bits for every
per-device batch size.
"""

from hf_ga.check.steps import CheckContext, run_hf_ga_step
from hf_ga.check.verdict.rows import OURS, Cause, ReportRow
from hf_ga.recovery.checkpoint import state_sha256

MULTIPLES = (1, 2, 4)  # per-device batch sizes, in chunks


def same_bits_row(context: CheckContext, chunk_size: int) -> ReportRow:
    """Return the row "bits": the window's gradient in chunks of `chunk_size` samples, with
    per-device batch sizes of 1, 2 and 4 chunks, has one hash and loss.
    """
    results: dict[int, tuple[str, float]] = {}  # batch size -> hash of the gradients, loss
    for batch_size in [chunk_size * multiple for multiple in MULTIPLES]:
        window = context.first_samples_window(
            len(context.samples),
            per_device_batch_size=batch_size,
            canonical_micro_batch=chunk_size,
        )
        loss, gradients = run_hf_ga_step(context, window)
        results[batch_size] = (state_sha256(gradients), loss)
    sizes = [len(micro_batch) for micro_batch in window.micro_batches]
    _, first_loss = results[chunk_size]
    row = ReportRow(OURS, "bits", sizes, len(sizes), loss=first_loss)
    row.passed = len(set(results.values())) == 1
    row.error = 0.0 if row.passed else float("inf")
    row.worst_share = row.error
    if not row.passed:
        hashes = [
            f"per-device batch size {batch_size}: {sha256[:12]}"
            for batch_size, (sha256, _) in results.items()
        ]
        text = (
            "a kernel of the model gives other bits when it runs again: call "
            "torch.use_deterministic_algorithms(True)"
        )
        row.causes.append(Cause("not deterministic", text, ", ".join(hashes)))
    return row
