"""Promise of `same_bits`: the gradient of a window has the same bits for every per-device batch
size.
"""

from hf_ga.check.rows import OURS, Cause, Row
from hf_ga.check.subjects import Subject, run_ours
from hf_ga.recovery.checkpoint import state_sha256

MULTIPLES = (1, 2, 4)  # of the chunk's size


def bits_row(subject: Subject, chunk_size: int) -> Row:
    """Compute the window with several per-device batch sizes, each in chunks of that many samples,
    and compare hashes.
    """
    found: dict[int, tuple[str, float]] = {}  # batch size -> hash of the gradients, loss
    for batch_size in [chunk_size * multiple for multiple in MULTIPLES]:
        window = subject.window(
            len(subject.samples), per_device_batch_size=batch_size, canonical_micro_batch=chunk_size
        )
        loss, gradients = run_ours(subject, window)
        found[batch_size] = (state_sha256(gradients), loss)
    sizes = [len(micro_batch) for micro_batch in window.micro_batches]
    (_, loss), *_ = found.values()
    row = Row(OURS, "bits", sizes, len(sizes), loss=loss)
    row.passed = len(set(found.values())) == 1
    row.error = 0.0 if row.passed else float("inf")
    row.worst_share = row.error
    if not row.passed:
        hashes = [
            f"per-device batch size {batch_size}: {sha256[:12]}"
            for batch_size, (sha256, _) in found.items()
        ]
        text = (
            "a kernel of the model gives other bits when it runs again: call "
            "torch.use_deterministic_algorithms(True)"
        )
        row.causes.append(Cause("not deterministic", text, ", ".join(hashes)))
    return row
