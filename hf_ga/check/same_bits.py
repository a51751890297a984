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
    hashes = []
    losses = []
    sizes = []
    for multiple in MULTIPLES:
        size = chunk_size * multiple
        window = subject.window(
            len(subject.samples), per_device_batch_size=size, canonical_micro_batch=chunk_size
        )
        loss, gradients = run_ours(subject, window)
        hashes.append(state_sha256(gradients))
        losses.append(loss)
        sizes = [len(micro_batch) for micro_batch in window.micro_batches]
    row = Row(
        OURS,
        "bits",
        sizes,
        len(sizes),
        passed=len({*zip(hashes, losses, strict=True)}) == 1,
        loss=losses[0],
    )
    row.error = row.worst_share = 0.0 if row.passed else float("inf")
    if not row.passed:
        seen = ", ".join(
            f"per-device batch size {chunk_size * m}: {h[:12]}"
            for m, h in zip(MULTIPLES, hashes, strict=True)
        )
        text = (
            "a kernel of the model gives other bits when it runs again: call "
            "torch.use_deterministic_algorithms(True)"
        )
        row.causes.append(Cause("not deterministic", text, seen))
    return row
