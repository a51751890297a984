"""Real process groups: 2 and 3 processes under DDP, FSDP1 and FSDP2, against one process.

The references are computed here, on the whole window at once, by plain forwards and backwards under
keyed dropout.
"""

import copy
import functools
import json
from functools import partial
from pathlib import Path

import helpers as h
import numpy as np
import pytest
import scenarios_worker
import torch
import torch.nn.functional as F
from forked import run_script
from processes import SEED
from safetensors.torch import load_file
from scenarios_worker import HEADS, KINDS, LAST, MAX_NORM, MICRO_BATCHES, STEPS, WINDOW
from tried import keyed

from hf_ga.order.order import epoch_order

pytestmark = pytest.mark.slow("starts processes")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """num_processes -> the folder with what its scenarios wrote."""
    folder = tmp_path_factory.mktemp("processes")
    run_script(scenarios_worker.__file__, folder, {"folder": str(folder)})
    return lambda num_processes: folder / str(num_processes)


def facts(folder: Path, name: str) -> list[dict]:
    """What each process wrote, in the order of the processes."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.[0-9].json"))]


def positions_of(window: int) -> np.ndarray:
    return np.arange(WINDOW) if window == 0 else np.arange(WINDOW, WINDOW + LAST)


def full_batch(
    model: torch.nn.Module, samples: list[dict], epoch: int, window: int
) -> torch.Tensor:
    """The loss of a window in one plain forward, backward done, under the dropout of its
    samples.
    """
    positions = positions_of(window)
    order = epoch_order(len(samples), SEED, epoch, True)
    with keyed(SEED, epoch, positions, window):
        loss = model(**h.pad_right([samples[i] for i in order[positions]])).loss
        loss.backward()
    return loss.detach()


def full_router_gradient(model: torch.nn.Module, batch: dict, dtype: torch.dtype) -> h.Gradients:
    """One plain forward and backward. The mean is taken from the logits, which the head casts to
    float32.
    """
    model = model.to(dtype)
    model.set_experts_implementation("eager")  # the others have no float64
    outputs = model(**batch)
    labels = batch["labels"]
    targets = F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=h.IGNORED
    )
    (targets + model.config.router_aux_loss_coef * outputs.aux_loss).backward()
    return h.gradients(model)


@pytest.fixture(scope="module")
def references():
    """Of each window: gradients of the full batch in float32 and in float64, and the loss in
    float64.
    """
    samples = h.token_samples(WINDOW + LAST)
    made = []
    for window in (0, 1):
        grads = []
        for dtype in (torch.float32, torch.float64):
            model = h.gpt2(0.1)
            model.to(dtype)
            loss = full_batch(model, samples, 0, window)
            grads.append(h.gradients(model))
        made.append((*grads, loss.item()))
    return made


# -- the gradient of a window
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1], ids=["64 samples", "13 samples"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_full_batch_s(found, references, kind, window):
    """64 and 13 samples on three processes: no share is even."""
    grads32, grads64, loss = references[window]
    for each in ["once"] if kind == "ddp" else ["once", "each"]:
        name = f"gradients {kind} {window} {each}"
        error = h.relative_error(load_file(found(3) / f"{name}.safetensors"), grads64)
        assert error <= 1e-6 + 3 * h.relative_error(grads32, grads64)
        everybody = facts(found(3), name)
        assert len(everybody) == 3
        assert all(fact == everybody[0] for fact in everybody)
        assert everybody[0]["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("window", [0, 1], ids=["64 samples", "13 samples"])
def test_the_average_of_local_means_fails_the_same_test(found, window):
    """What Accelerate's usual loop computes: DDP averages the processes' means, which had different
    numbers of targets.
    """
    samples = h.token_samples(WINDOW + LAST)
    whole = h.pad_right(
        [samples[i] for i in epoch_order(len(samples), SEED, 0, True)[positions_of(window)]]
    )
    grads32, grads64 = (
        h.full_batch_gradient(h.gpt2(), whole, dtype) for dtype in (torch.float32, torch.float64)
    )
    error = h.relative_error(load_file(found(2) / f"naive means {window}.safetensors"), grads64)
    assert error > 1e-3 > 1e-6 + 3 * h.relative_error(grads32, grads64)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_windows_add_up(found, references, kind):
    (first32, first64, _), (second32, second64, _) = references
    sum32, sum64 = (
        {n: a[n] + b[n] for n in a} for a, b in ((first32, second32), (first64, second64))
    )
    error = h.relative_error(load_file(found(2) / f"added {kind}.safetensors"), sum64)
    assert error <= 1e-6 + 3 * h.relative_error(sum32, sum64)
    assert h.relative_error(second64, sum64) > 0.1  # the control: the second alone
    assert [fact["skipped"] for fact in facts(found(2), f"added {kind}")] == [
        [False, False, True]
    ] * 2


def test_small_buckets_of_two_types(found):
    """By hand: the sum of 10 i + 1 and 10 i + 2; one that only the second has; one that nobody
    has.
    """
    f32 = "torch.float32"
    f64 = "torch.float64"
    expected = [[3.0, 3.0, f32], [12.0, 12.0, f32], [43.0, 43.0, f64], None, [83.0, 83.0, f32]]
    assert facts(found(2), "buckets") == [expected, expected]


@functools.cache
def references_of_head(head: str) -> list[tuple[h.Gradients, h.Gradients]]:
    """Of both windows, in float32 and float64."""
    build, make_samples, _, loss_fn, _ = HEADS[head]
    samples = make_samples(21)
    order = epoch_order(21, SEED, 0, True)
    full = (
        full_router_gradient
        if head == "router"
        else partial(h.full_batch_gradient, loss_fn=loss_fn)
    )
    wholes = [
        h.pad_right([samples[i] for i in order[positions]])
        for positions in (slice(0, 18), slice(18, 21))
    ]
    return [
        tuple(full(build(), whole, dtype) for dtype in (torch.float32, torch.float64))
        for whole in wholes
    ]


@pytest.mark.parametrize(
    ("head", "kind"),
    [(head, kind) for head in HEADS for kind in HEADS[head][-1]],
)
def test_heads_with_rules_of_their_own(found, kind, head):
    """Two divisors, a balancing loss over the window, an own loss, heads that only some samples
    use, a loss that sees padding: 18 samples and 3, which the last process has alone, against full
    batches.
    """
    for window, (grads32, grads64) in enumerate(references_of_head(head)):
        name = f"heads {kind} {head} {window}"
        assert all(all(fact["no_gradient"]) for fact in facts(found(3), name))
        grads = load_file(found(3) / f"{name}.safetensors")
        grads = {name: grads.get(name, torch.zeros_like(g)) for name, g in grads32.items()}
        assert h.relative_error(grads, grads64) <= 1e-6 + 3 * h.relative_error(grads32, grads64)


@pytest.mark.parametrize(
    ("head", "kind", "words"),
    [
        (
            "sum of two means",
            "fsdp1",
            "which need a buffer each, but FSDP and pipelines have one: use DDP",
        ),
        (
            "sum of two means",
            "fsdp2",
            "which need a buffer each, but FSDP and pipelines have one: use DDP",
        ),
        ("router", "fsdp1", "use FSDP2 instead of FSDP1"),
    ],
)
def test_heads_that_fsdp_refuses(found, head, kind, words):
    """On all processes, so that none of them waits for another."""
    everybody = facts(found(3), f"refused head {kind} {head}")
    assert len(everybody) == 3
    assert all(words in fact["said"] for fact in everybody)


@pytest.fixture(scope="module")
def gpt2_references():
    """Gradients of a window of 64 in float64, in float32, and under autocast to bf16, each on the
    full batch.
    """
    samples = h.token_samples(WINDOW)
    made = []
    order = epoch_order(WINDOW, SEED, 0, True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = h.gpt2(0.1)
        low = dtype == torch.bfloat16
        draws = keyed(SEED, 0, np.arange(WINDOW))
        with draws, torch.autocast("cpu", torch.bfloat16, enabled=low):
            (model if low else model.to(dtype))(
                **h.pad_right([samples[i] for i in order])
            ).loss.backward()
        made.append(h.gradients(model))
    return made


@pytest.mark.parametrize("option", ["checkpointing", "bf16"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_activation_checkpointing_and_bf16(found, gpt2_references, kind, option):
    """bf16 against the rounding of autocast on one process; FSDP rounds the layer norms' parameters
    as well.
    """
    grads64, grads32, grads16 = gpt2_references
    own = h.relative_error(grads32 if option == "checkpointing" else grads16, grads64)
    error = h.relative_error(load_file(found(2) / f"options {kind} {option}.safetensors"), grads64)
    assert error <= 1e-6 + 3 * own
    assert all(
        fact["types"] == ["torch.float32"] for fact in facts(found(2), f"options {kind} {option}")
    )


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_losses_under_bf16_are_not_rounded(found, kind):
    """Accelerate lets FSDP2 round them to bf16, and with them the weight of each micro-batch."""
    for fact in facts(found(2), f"options {kind} bf16"):
        assert fact["type_of_loss"] == "torch.float32"


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_what_fsdp_would_silently_do_is_refused(found, kind):
    """Sums in bf16 (Accelerate's own policy; `hf_ga.prepare` sets float32), losses in bf16, no sums
    of ignored modules.
    """
    prepare = "Call hf_ga.prepare(accelerator, model, optimizer)"
    ignored = "does not reduce the gradients of fsdp_ignored_modules"
    words = {
        "fsdp1": [prepare, prepare, ignored],
        "fsdp2": [prepare, prepare, prepare, ignored],
    }[kind]
    for fact in facts(found(2), f"refused {kind}"):
        assert fact["reduce_dtype"] == "torch.float32"
        assert all(word in said for word, said in zip(words, fact["said"], strict=True)), fact[
            "said"
        ]


def test_an_optimizer_over_one_bias(found):
    """FSDP1's shards give one of the processes nothing of it: both agree that a step was made."""
    first, second = facts(found(2), "subset fsdp1")
    assert first == second
    assert first["skipped"] == [False, False]
    before = h.bert_classifier().state_dict()
    after = load_file(found(2) / "subset fsdp1.safetensors")
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {"classifier.bias"}


# -- steps
# -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps():
    """Plain PyTorch: full batch, clip, AdamW."""
    model = h.gpt2(0.1)
    samples = h.token_samples(WINDOW + LAST)
    losses = []
    norms = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(full_batch(model, samples, step // 2, step % 2).item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return losses, norms, copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_adamw(found, steps, kind):
    losses, norms, weights = steps
    first, second = facts(found(2), f"steps {kind}")
    assert first == second
    assert first["losses"] == pytest.approx(losses, rel=1e-5)
    assert first["norms"] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > MAX_NORM  # so clipping did something
    whole = load_file(found(2) / f"steps {kind}.safetensors")
    assert {name for name in weights if "lm_head" not in name} <= whole.keys()
    assert max((whole[name] - weights[name]).abs().max() for name in whole) < 1e-4


def test_other_dropout_masks_fail_the_same_test(steps):
    """The control of the comparison above: another seed of dropout alone moves the first losses by
    more than the tolerance.
    """
    model = h.gpt2(0.1)
    samples = h.token_samples(WINDOW + LAST)
    loss = model(
        **h.pad_right(
            [samples[i] for i in epoch_order(len(samples), SEED, 0, True)[positions_of(0)]]
        )
    ).loss.item()
    assert abs(loss - steps[0][0]) / loss > 3e-5


# -- what is sent
# ------------------------------------------------------------------------------------------------------------


def test_ddp_sums_gradients_once_a_window(found):
    """One all-reduce of exactly the gradients' bytes and three small ones, however many
    micro-batches: whether all have the rehearsal, whether there are new terms, status.
    """
    for micro_batches in MICRO_BATCHES:
        for fact in facts(found(2), f"counted ddp {micro_batches} once"):
            assert fact["micro_batches"] == micro_batches
            assert fact["calls"] == {"allreduce": 1}
            assert fact["small"] == 3
            assert fact["bytes"]["allreduce"] == fact["gradient_bytes"]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_fsdp_reduces_once_a_window_or_each_time(found, kind):
    """Parameters are gathered in every micro-batch; gradients are reduced once, or each time where
    that is asked for.
    """
    counts = {}
    for micro_batches in MICRO_BATCHES:
        for how in ("once", "each"):
            first, second = facts(found(2), f"counted {kind} {micro_batches} {how}")
            assert first["calls"] == second["calls"]
            counts[micro_batches, how] = first["calls"]
    one = counts[1, "once"]
    several = MICRO_BATCHES[-1]
    for how in ("once", "each"):
        calls = counts[several, how]
        assert calls["allgather"] == one["allgather"] * several
        assert calls["reduce_scatter"] == one["reduce_scatter"] * (1 if how == "once" else several)


# -- scaler
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_process_skips_the_window_on_all(found, kind):
    first, second = facts(found(2), f"overflow {kind}")
    assert first == second  # bit for bit, weights included
    assert first["skipped"] == [[False, False], [True, True], [False, False], [False, False]]
    assert first["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert first["digests"][0] == first["digests"][1]
    assert len(set(first["digests"])) == 3
