"""Real process groups: 1, 2, 3 and 4 processes under DDP, FSDP1 and FSDP2, launched by `accelerate launch`, against one process.

The references are computed here, on the whole window at once, by plain forwards and backwards under keyed dropout.
"""

import copy
import json
from functools import partial
from pathlib import Path

import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launching import launch
from processes import SEED
from safetensors.torch import load_file
from scenarios_worker import CASES, HEADS, KINDS, LAST, MAX_NORM, MICRO_BATCHES, STEPS, WINDOW

import hf_ga
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.order import epoch_order

pytestmark = pytest.mark.slow("starts processes")
WORKER = Path(__file__).with_name("scenarios_worker.py")
SCENARIOS = {
    1: ["gradients", "steps"],
    2: ["gradients", "steps", "naive", "counted", "overflow", "heads", "options", "subset", "added", "buckets"],
    3: ["gradients", "steps", "heads"],
    4: ["few_samples"],
}
LAUNCHES = [(kind, n) for n in SCENARIOS for kind in (KINDS if n > 1 else KINDS[:1])]  # one process shards nothing
LAYOUTS = [(kind, n) for kind, n in LAUNCHES if "gradients" in SCENARIOS[n]]


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """num_processes -> the folder with what its scenarios wrote; each number of processes is launched once."""
    folders = {}

    def folder_of(num_processes: int) -> Path:
        if num_processes not in folders:
            folder = tmp_path_factory.mktemp(f"processes{num_processes}")
            kinds = ",".join(kind for kind, n in LAUNCHES if n == num_processes)
            done = launch(num_processes, WORKER, str(folder), kinds, *SCENARIOS[num_processes])
            folders[num_processes] = folder, done
        folder, done = folders[num_processes]
        said = [line for line in done.stderr.splitlines() if "[rank" in line or "Error" in line or "exitcode" in line]
        assert done.returncode == 0, "\n".join(said)[-6000:]
        return folder

    return folder_of


def facts(folder: Path, name: str) -> list[dict]:
    """What each process wrote, in the order of the processes."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.[0-9].json"))]


def positions_of(window: int) -> np.ndarray:
    return np.arange(WINDOW) if window == 0 else np.arange(WINDOW, WINDOW + LAST)


def full_batch(model: torch.nn.Module, rule: hf_ga.ProvenLoss, samples: list[dict], epoch: int, window: int) -> torch.Tensor:
    """The loss of a window in one plain forward, backward done, under the dropout of its samples."""
    positions = positions_of(window)
    order = epoch_order(len(samples), SEED, epoch, True)
    rule.dropout.set_keys(sample_keys(SEED, epoch, positions), window_key(SEED, epoch, window))
    with rule.dropout.scope(model):
        loss = model(**h.pad_right([samples[i] for i in order[positions]])).loss
        loss.backward()
    return loss.detach()


def full_router_gradient(model: torch.nn.Module, batch: dict, dtype: torch.dtype) -> h.Gradients:
    """One plain forward and backward. The mean is taken from the logits, which the head casts to float32."""
    model = model.to(dtype)
    model.set_experts_implementation("eager")  # the others have no float64
    outputs, labels = model(**batch), batch["labels"]
    targets = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=h.IGNORED)
    (targets + model.config.router_aux_loss_coef * outputs.aux_loss).backward()
    return h.gradients(model)


@pytest.fixture(scope="module")
def references():
    """(case, window) -> gradients of the full batch in float32 and in float64, and the loss in float64."""
    made = {}
    for case, (build, make_samples, _) in CASES.items():
        samples = make_samples(WINDOW + LAST)
        for window in (0, 1):
            grads = []
            for dtype in (torch.float32, torch.float64):
                model = build(0.1)
                rule = hf_ga.prove_targets(model, samples, h.pad_right)
                model.to(dtype)
                loss = full_batch(model, rule, samples, 0, window)
                grads.append(h.gradients(model))
            made[case, window] = (*grads, loss.item())
    return made


# -- the gradient of a window ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1], ids=["64 samples", "13 samples"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "num_processes"), LAYOUTS)
def test_gradient_is_the_full_batch_s(found, references, kind, num_processes, case, window):
    grads32, grads64, loss = references[case, window]
    for each in ["once"] if kind == "ddp" else ["once", "each"]:
        name = f"gradients {kind} {case} {window} {each}"
        grads = load_file(found(num_processes) / f"{name}.safetensors")
        error, own = h.relative_error(grads, grads64), h.relative_error(grads32, grads64)
        print(f"MEASURED {num_processes} processes {name}: {error:.1e} (full batch {own:.1e})")
        assert error <= 1e-6 + 3 * own
        all_facts = facts(found(num_processes), name)
        assert len(all_facts) == num_processes and all(f == all_facts[0] for f in all_facts)
        assert all_facts[0]["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("window", [0, 1], ids=["64 samples", "13 samples"])
def test_the_average_of_local_means_fails_the_same_test(found, window):
    """What Accelerate's usual loop computes: DDP averages the processes' means, which had different numbers of targets."""
    samples = h.token_samples(WINDOW + LAST)
    whole = h.pad_right([samples[i] for i in epoch_order(len(samples), SEED, 0, True)[positions_of(window)]])
    grads32, grads64 = (h.full_batch_gradient(h.gpt2(), whole, dtype) for dtype in (torch.float32, torch.float64))
    error = h.relative_error(load_file(found(2) / f"naive means {window}.safetensors"), grads64)
    print(f"MEASURED average of local means, window {window}: {error:.1e}")
    assert error > 1e-3 > 1e-6 + 3 * h.relative_error(grads32, grads64)


def test_even_batches_repeats_samples(found):
    """Accelerate's data loader fills the tail of 13 with its first rows: 16 rows, another gradient, though rightly weighted."""
    samples = h.token_samples(WINDOW + LAST)[WINDOW:]
    grads64 = h.full_batch_gradient(h.gpt2(), h.pad_right(samples), torch.float64)
    rows = np.concatenate([fact["rows"] for fact in facts(found(2), "naive tail")])
    assert rows[:, 0].sum() == 16
    total = rows[:, 1].sum()
    repeated = {name: g / total for name, g in load_file(found(2) / "naive tail.safetensors").items()}
    assert h.relative_error(repeated, grads64) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_windows_add_up(found, references, kind):
    (first32, first64, _), (second32, second64, _) = references["GPT-2", 0], references["GPT-2", 1]
    sum32, sum64 = ({n: a[n] + b[n] for n in a} for a, b in ((first32, second32), (first64, second64)))
    error = h.relative_error(load_file(found(2) / f"added {kind}.safetensors"), sum64)
    assert error <= 1e-6 + 3 * h.relative_error(sum32, sum64)
    assert h.relative_error(second64, sum64) > 0.1  # the control: the second alone


def test_small_buckets_of_two_types(found):
    """By hand: the sum of 10 i + 1 and 10 i + 2; one that only the second has; one that nobody has."""
    f32, f64 = "torch.float32", "torch.float64"
    expected = [[3.0, 3.0, f32], [12.0, 12.0, f32], [43.0, 43.0, f64], None, [83.0, 83.0, f32]]
    assert facts(found(2), "buckets") == [expected, expected]


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize(("head", "kind"), [(head, kind) for head in HEADS for kind in KINDS if kind == "ddp" or HEADS[head][2]])
def test_heads_with_rules_of_their_own(found, kind, head, num_processes):
    """Two divisors, a balancing loss over the window, an own loss, heads that only some samples use, a loss that sees padding: 18
    samples and 3, which the last process has alone, against full batches.
    """
    build, make_samples, _, loss_fn = HEADS[head]
    samples = make_samples(21)
    order = epoch_order(21, SEED, 0, True)
    for window, positions in enumerate([slice(0, 18), slice(18, 21)]):
        told = facts(found(num_processes), f"heads {kind} {head} {window}")
        whole = h.pad_right([samples[i] for i in order[positions]])
        full = full_router_gradient if head == "router" else partial(h.full_batch_gradient, loss_fn=loss_fn)
        grads32, grads64 = (full(build(), whole, dtype) for dtype in (torch.float32, torch.float64))
        grads = load_file(found(num_processes) / f"heads {kind} {head} {window}.safetensors")
        assert all(all(fact["no_gradient"]) for fact in told)
        grads = {name: grads.get(name, torch.zeros_like(g)) for name, g in grads32.items()}
        assert h.relative_error(grads, grads64) <= 1e-6 + 3 * h.relative_error(grads32, grads64)


@pytest.fixture(scope="module")
def gpt2_references():
    """Gradients of a window of 64 in float64, in float32, and under autocast to bf16, each on the full batch."""
    samples, made = h.token_samples(WINDOW), []
    order = epoch_order(WINDOW, SEED, 0, True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = h.gpt2(0.1)
        rule = hf_ga.prove_targets(model, samples, h.pad_right)
        rule.dropout.set_keys(sample_keys(SEED, 0, np.arange(WINDOW)), window_key(SEED, 0, 0))
        low = dtype == torch.bfloat16
        with rule.dropout.scope(model), torch.autocast("cpu", torch.bfloat16, enabled=low):
            (model if low else model.to(dtype))(**h.pad_right([samples[i] for i in order])).loss.backward()
        made.append(h.gradients(model))
    return made


@pytest.mark.parametrize("option", ["checkpointing", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_and_bf16(found, gpt2_references, kind, option):
    """bf16 against the rounding of autocast on one process; FSDP rounds the layer norms' parameters as well."""
    grads64, grads32, grads16 = gpt2_references
    own = h.relative_error(grads32 if option == "checkpointing" else grads16, grads64)
    error = h.relative_error(load_file(found(2) / f"options {kind} {option}.safetensors"), grads64)
    print(f"MEASURED {kind} {option}: {error:.1e} (full batch {own:.1e})")
    assert error <= 1e-6 + 3 * own
    assert all(fact["types"] == ["torch.float32"] for fact in facts(found(2), f"options {kind} {option}"))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_what_fsdp_would_silently_do_is_refused(found, kind):
    """Sums in bf16 (Accelerate's own policy; `hf_ga.prepare` sets float32), no sums of ignored modules, a proof on shards."""
    words = ["Call hf_ga.prepare(accelerator, model, optimizer)"] * 2 + ["does not reduce the gradients of fsdp_ignored_modules"]
    words += ["proven before it is wrapped"] * (kind == "fsdp1")
    for fact in facts(found(2), f"refused {kind}"):
        assert fact["reduce_dtype"] == "torch.float32"
        assert all(word in said for word, said in zip(words, fact["said"], strict=True)), fact["said"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_over_one_bias(found, kind):
    """FSDP1's shards give one of the processes nothing of it: both agree that a step was made."""
    first, second = facts(found(2), f"subset {kind}")
    assert first == second and first["skipped"] == [False, False]
    before, after = h.bert_classifier().state_dict(), load_file(found(2) / f"subset {kind}.safetensors")
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {"classifier.bias"}


# -- thirty steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thirty_steps():
    """Plain PyTorch: full batch, clip, AdamW."""
    build, make_samples, _ = CASES["GPT-2"]
    model, samples, losses, norms = build(0.1), make_samples(WINDOW + LAST), [], []
    rule = hf_ga.prove_targets(model, samples, h.pad_right)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(full_batch(model, rule, samples, step // 2, step % 2).item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return losses, norms, copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(("kind", "num_processes"), LAYOUTS)
def test_thirty_steps_of_adamw(found, thirty_steps, kind, num_processes):
    losses, norms, weights = thirty_steps
    everybody = facts(found(num_processes), f"steps {kind}")
    assert len(everybody) == num_processes and all(fact == everybody[0] for fact in everybody)
    off = max(abs(a - b) / b for a, b in zip(everybody[0]["losses"], losses, strict=True))
    print(f"MEASURED {num_processes} processes, {kind}: losses of 30 steps differ by at most {off:.1e}")
    assert off < 1e-5
    assert everybody[0]["norms"] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > MAX_NORM  # so clipping did something
    whole = load_file(found(num_processes) / f"steps {kind}.safetensors")
    assert {name for name in weights if "lm_head" not in name} <= whole.keys()
    assert max((whole[name] - weights[name]).abs().max() for name in whole) < 1e-4


def test_other_dropout_masks_fail_the_same_test(thirty_steps):
    """The control of the comparison above: another seed of dropout alone moves the first losses by more than the tolerance."""
    build, make_samples, _ = CASES["GPT-2"]
    model, samples = build(0.1), make_samples(WINDOW + LAST)
    loss = model(**h.pad_right([samples[i] for i in epoch_order(len(samples), SEED, 0, True)[positions_of(0)]])).loss.item()
    assert abs(loss - thirty_steps[0][0]) / loss > 3e-5


# -- what is sent ------------------------------------------------------------------------------------------------------------


def test_ddp_sums_gradients_once_a_window(found, num_processes=2):
    """One all-reduce of exactly the gradients' bytes and two small ones (targets, status), however many micro-batches."""
    for micro_batches in MICRO_BATCHES[num_processes]:
        for fact in facts(found(num_processes), f"counted ddp {micro_batches} once"):
            assert fact["micro_batches"] == micro_batches
            assert fact["calls"] == {"allreduce": 1} and fact["small"] == 2
            assert fact["bytes"]["allreduce"] == fact["gradient_bytes"]
    least = 2 * (num_processes - 1) / num_processes * fact["gradient_bytes"]
    print(
        f"MEASURED W={num_processes}: a process sends and receives at least {least:,.0f} bytes for {fact['gradient_bytes']:,} "
        f"of gradients (ring all-reduce of {fact['bytes']['allreduce']:,})"
    )


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_fsdp_reduces_once_a_window_or_each_time(found, kind, num_processes=2):
    """Parameters are gathered in every micro-batch; gradients are reduced once, or each time where that is asked for."""
    counts = {}
    for micro_batches in MICRO_BATCHES[num_processes]:
        for how in ("once", "each"):
            everybody = facts(found(num_processes), f"counted {kind} {micro_batches} {how}")
            assert all(fact["calls"] == everybody[0]["calls"] for fact in everybody)
            counts[micro_batches, how] = everybody[0]
            calls, sent = everybody[0]["calls"], everybody[0]["bytes"]
            print(f"MEASURED W={num_processes} {kind}, {micro_batches} micro-batches, reduced {how}: {calls}, bytes {sent}")
    one = counts[1, "once"]["calls"]
    for micro_batches in MICRO_BATCHES[num_processes][1:]:
        for how in ("once", "each"):
            calls = counts[micro_batches, how]["calls"]
            assert calls["allgather"] == one["allgather"] * micro_batches
            assert calls["reduce_scatter"] == one["reduce_scatter"] * (1 if how == "once" else micro_batches)


# -- scaler, empty processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_process_skips_the_window_on_all(found, kind):
    first, second = facts(found(2), f"overflow {kind}")
    assert first == second  # bit for bit, weights included
    assert first["skipped"] == [[False, False], [True, True], [False, False], [False, False]]
    assert first["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert first["digests"][0] == first["digests"][1] and len(set(first["digests"])) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 1, 6])
def test_fewer_samples_than_processes(found, kind, size):
    """Windows of 3, 1 and 6 samples on 4 processes; the last has one sample; some windows and processes have no target."""
    samples, folder, seen_empty, seen_skipped = h.token_samples(7), found(4), False, False
    samples[1], samples[4] = h.without_targets(samples[1]), h.without_targets(samples[4])
    rule = hf_ga.prove_targets(h.gpt2(0.1), h.token_samples(8), h.pad_right)
    for window, start in enumerate(range(0, 7, size)):
        name, positions = f"few {kind} {size} {window}", np.arange(start, min(start + size, 7))
        everybody = facts(folder, name)
        assert len(everybody) == 4 and len({(f["loss"], f["targets"], f["skipped"]) for f in everybody}) == 1
        seen_empty |= any(fact["own"] == 0 for fact in everybody)
        assert sum(fact["own"] for fact in everybody) == len(positions)
        whole = h.pad_right([samples[i] for i in positions])
        grads = load_file(folder / f"{name}.safetensors")
        if not h.num_targets(h.gpt2(), whole):
            assert everybody[0]["skipped"] and not any(g.abs().sum() for g in grads.values())
            seen_skipped = True
            continue
        made = []
        for dtype in (torch.float32, torch.float64):
            model = h.gpt2(0.1)
            rule = hf_ga.prove_targets(model, h.token_samples(8), h.pad_right)
            rule.dropout.set_keys(sample_keys(SEED, 0, positions), window_key(SEED, 0, window))
            model.to(dtype)
            with rule.dropout.scope(model):
                model(**whole).loss.backward()
            made.append(h.gradients(model))
        assert h.relative_error(grads, made[1]) <= 1e-6 + 3 * h.relative_error(made[0], made[1])
    assert (seen_empty or size == 6) and seen_skipped == (size == 1)
