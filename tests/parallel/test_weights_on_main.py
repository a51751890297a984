"""FSDP2 with `cpu_ram_efficient_loading`: two ranks of which only rank 0 has the model's weights.

The references are one process, and the same two ranks that both have the weights.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers as h
import pairs
import pytest
import torch
import transformers as tf
from accelerate import Accelerator, init_empty_weights
from forked import on_two_ranks, outcome, without_errors
from processes import assert_wrapped, make_accelerator, make_windows, whole_gradients
from torch import nn
from torch.utils.data import DataLoader

import hf_ga
from hf_ga.parallel.main_weights import loads_on_main

slow = pytest.mark.slow("starts processes")
NUM_SAMPLES = 21  # windows of 16 and 5
SIZES = {"global_batch_size": 16, "per_device_batch_size": 4}
LAYERS = {
    "gpt2": (partial(h.gpt2, 0.1), "GPT2Block"),
    "bert": (partial(h.bert_masked_lm, 0.1), "BertLayer"),
    "mixtral": (partial(h.mixtral, 0.5), "MixtralDecoderLayer"),
}


def from_main(layer: str = "GPT2Block") -> Accelerator:
    accelerator = make_accelerator("fsdp2", layer)
    accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = True
    return accelerator


def build_on_meta(accelerator: Accelerator, build: Callable[[], nn.Module]) -> nn.Module:
    if accelerator.is_main_process:
        return build()
    with torch.device("meta"):
        return build()


def empty_elsewhere(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Return a context manager in which a model is built on the meta device, except on processes
    that load its weights.
    """
    if accelerator.is_main_process or not loads_on_main(accelerator):
        return nullcontext()
    return init_empty_weights()


def build_empty(accelerator: Accelerator, build: Callable[[], nn.Module]) -> nn.Module:
    """Parameters that are tied on rank 0 are not tied then."""
    with empty_elsewhere(accelerator):
        return build()


def build_others(accelerator: Accelerator, build: Callable[[], nn.Module]) -> nn.Module:
    """Rank 1 has other weights, which must not be used."""
    model = build()
    if not accelerator.is_main_process:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    return model


def trained(
    accelerator: Accelerator, model: nn.Module, samples: list[dict], collate=h.pad_right
) -> tuple[h.Gradients, float, dict[str, torch.Tensor]]:
    """The gradient of the first window, and loss and weights after two updates."""
    windows = make_windows(accelerator, samples, collate, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    assert_wrapped(model, "fsdp2", accelerator)
    first, second = windows
    hf_ga.backward_window(accelerator, model, first)
    gradients = whole_gradients(model)
    optimizer.step()
    result = hf_ga.train_step(accelerator, model, optimizer, second, max_grad_norm=1.0)
    weights = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    return gradients, result.loss, weights


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("gpt2", build_others),
        pytest.param("gpt2", build_empty, marks=slow),
        pytest.param("gpt2", build_on_meta, marks=slow),
        pytest.param("bert", build_on_meta, marks=slow),
        pytest.param("mixtral", build_on_meta, marks=slow),
    ],
)
def test_gradient_and_updates_are_those_of_one_process(name, made):
    """Tied weights, a bias with two names, a router, dropout."""
    build, layer = LAYERS[name]
    samples = h.token_samples(NUM_SAMPLES)
    gradients, loss, weights = trained(Accelerator(cpu=True), build(), samples)

    def work():
        accelerator = from_main(layer)
        return trained(accelerator, made(accelerator, build), samples)

    for found, found_loss, found_weights in without_errors(on_two_ranks(work, "fsdp2")):
        assert h.relative_error(found, gradients) < 1e-6
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found_weights.keys() == weights.keys()
        assert h.relative_error(found_weights, weights) < 1e-6


@pytest.mark.slow("the control, on two processes")
def test_without_the_setting_each_rank_shards_its_own_weights():
    """The control: the other ranks' weights would be seen."""
    build, layer = LAYERS["gpt2"]
    samples = h.token_samples(NUM_SAMPLES)
    gradients, *_ = trained(Accelerator(cpu=True), build(), samples)

    def work():
        accelerator = make_accelerator("fsdp2", layer)
        return trained(accelerator, build_others(accelerator, build), samples)

    for found, *_ in without_errors(on_two_ranks(work, "fsdp2")):
        assert h.relative_error(found, gradients) > 0.1


class Pair(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Odd(nn.Module):
    """A parameter of the model itself, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(h.VOCABULARY, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.pair = Pair()
        self.head = nn.Linear(8, h.VOCABULARY)
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.register_buffer("factor", torch.linspace(1, 2, 8), persistent=False)

    def forward(self, input_ids, labels):
        x = self.pair(self.table(input_ids) * self.scale + self.shift) * self.factor
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss)


def odd() -> Odd:
    model = h.seeded(Odd)()
    model.shift += 1.0  # as if loaded
    return model


def odd_samples() -> list[dict]:
    return [
        {name: sample[name] for name in ("input_ids", "labels")}
        for sample in h.token_samples(NUM_SAMPLES)
    ]


def test_buffers_and_ties_are_those_of_rank_0():
    gradients, loss, weights = trained(Accelerator(cpu=True), odd(), odd_samples())

    def work():
        accelerator = from_main("Pair")
        model = build_on_meta(accelerator, odd)
        found = trained(accelerator, model, odd_samples())
        is_tied = model.pair.first.weight is model.pair.second.weight
        return found, is_tied, list(model.state_dict()), (model.shift, model.factor)

    for found, is_tied, saved, buffers in without_errors(on_two_ranks(work, "fsdp2")):
        assert h.relative_error(found[0], gradients) < 1e-6
        assert h.relative_error(found[2], weights) < 1e-6
        assert found[1] == pytest.approx(loss, rel=1e-6)
        assert is_tied
        assert saved == list(odd().state_dict())
        assert torch.equal(buffers[0], odd().shift)
        assert torch.equal(buffers[1], odd().factor)


@slow
def test_accelerates_own_loop():
    """`hf_ga.Accelerator`, tried before the sharding and, without a loader, in the first window."""
    samples = h.token_samples(64)

    def loop(accelerator: hf_ga.Accelerator, *, together: bool) -> dict[str, torch.Tensor]:
        model = build_on_meta(accelerator, partial(h.gpt2, 0.1))
        loader = DataLoader(samples, batch_size=8, collate_fn=h.pad_right)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if together:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
            loader = accelerator.prepare(loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        return {name: whole(p).detach() for name, p in model.named_parameters()}

    def work() -> list[dict[str, torch.Tensor]]:
        accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        found = [loop(accelerator, together=True)]
        accelerator.free_memory()
        return [*found, loop(accelerator, together=False)]

    expected = loop(hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=4), together=True)
    for rank in without_errors(on_two_ranks(work, "fsdp2 from main")):
        for weights in rank:
            assert h.relative_error(weights, expected) < 1e-6


@slow
def test_a_loss_of_the_whole_window():
    """The rule refers to the user's own function."""

    def gradient(accelerator: Accelerator) -> tuple[h.Gradients, float]:
        model = build_on_meta(accelerator, partial(pairs.embedder, returns_scale=True))
        windows = make_windows(
            accelerator, pairs.pair_samples(20), pairs.collate_pairs, global_batch_size=20
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        whole_batch = pairs.info_nce(model)
        model, _ = hf_ga.prepare(accelerator, model, optimizer, windows, whole_batch=whole_batch)
        result = hf_ga.backward_window(accelerator, model, next(iter(windows)))
        return whole_gradients(model), result.loss

    expected, expected_loss = gradient(Accelerator(cpu=True))
    work = partial(outcome, lambda: gradient(from_main("BertLayer")))
    for found, loss in without_errors(on_two_ranks(work, "fsdp2")):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert h.relative_error(found, expected) < 2e-6


# What is refused


def prepared(build: Callable[[], nn.Module], layer: str = "GPT2Block", **how) -> Any:
    accelerator = from_main(layer)
    model = build_on_meta(accelerator, build)
    samples = how.get("samples") or h.token_samples(NUM_SAMPLES)
    windows = make_windows(accelerator, samples, **SIZES)
    parameters = [*model.parameters(), *how.get("others", [])]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return hf_ga.prepare(accelerator, model, optimizer, windows)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, input_ids, labels):
        raise TypeError("this model fails")


class Summing(Broken):
    def forward(self, input_ids, labels):
        return {"loss": self.layer(input_ids.float()[:, :2]).sum()}


def test_the_others_raise_the_error_of_the_trial():
    """Its own, if it is one of hf_ga's; they never wait for the end of a rank that is gone."""
    first, second = on_two_ranks(partial(prepared, Summing, samples=odd_samples()), "fsdp2")
    assert first == second
    assert first.startswith("LossNotAdditive: the loss is a sum, not a mean")


def test_the_others_are_told_of_another_error():
    first, second = on_two_ranks(partial(prepared, Broken, samples=odd_samples()), "fsdp2")
    assert first == "TypeError: this model fails"
    assert second == "ProcessFailed: process 0 failed: TypeError: this model fails"


def test_other_models_and_optimizers_are_refused():
    def larger_elsewhere() -> nn.Module:
        is_main = Accelerator(cpu=True).is_main_process
        return h.gpt2(n_positions=32 if is_main else 16)

    stranger = [nn.Parameter(torch.zeros(1))]
    for work, words in [
        (
            partial(prepared, larger_elsewhere),
            "process 1 built another model than the main process: transformer.wpe.weight",
        ),
        (partial(prepared, h.gpt2, others=stranger), "may have parameters of the model only"),
    ]:
        first, second = on_two_ranks(work, "fsdp2")
        assert first == second
        assert words in first


def test_fsdp1_is_refused():
    def work() -> None:
        accelerator = make_accelerator("fsdp1", "GPT2Block")
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = True
        model = h.gpt2()
        hf_ga.prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))

    for said in on_two_ranks(work, "fsdp1"):
        assert "FSDP1 does not support fsdp_cpu_ram_efficient_loading" in said


def test_nothing_is_tried_and_checked_without_weights():
    with torch.device("meta"):
        model = h.gpt2()
    with pytest.raises(hf_ga.ConfigError, match="the model has no weights on this process"):
        windows = make_windows(Accelerator(cpu=True), h.token_samples(8))
        hf_ga.prepare(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters()), windows)
    with pytest.raises(hf_ga.ConfigError, match="process 0 has no weights"):
        hf_ga.check_equivalence(model, h.token_samples(8), h.pad_right)


# Memory

MILLIONS = 40


def mebibytes(name: str) -> float:
    """VmRSS: now in the memory of this process; VmHWM: at most, since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def large_samples() -> list[dict]:
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> list[int]:
        return torch.randint(2, 8000, (length,), generator=generator).tolist()

    lengths = (5, 9, 3, 12, 7, 4, 11, 8)
    return [{"input_ids": tokens(n), "labels": tokens(n)} for n in lengths]


def loaded(folder: Path, accelerator: Accelerator) -> tuple[float, float, h.Gradients, float]:
    """Peaks of memory in MiB: until the model is loaded, and until it is sharded; then the gradient
    and the loss of a window.
    """
    before = mebibytes("VmRSS")
    forget_peak()
    with empty_elsewhere(accelerator):
        if accelerator.is_main_process:
            model = tf.AutoModelForCausalLM.from_pretrained(folder)
        else:
            model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(folder))
    model.train()
    samples = large_samples()
    windows = make_windows(
        accelerator, samples, global_batch_size=len(samples), per_device_batch_size=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peak_loaded = mebibytes("VmHWM") - before
    model, _ = hf_ga.prepare(accelerator, model, optimizer, windows)
    peak_sharded = mebibytes("VmHWM") - before
    result = hf_ga.backward_window(accelerator, model, next(iter(windows)))
    return peak_loaded, peak_sharded, whole_gradients(model), result.loss


@pytest.mark.slow("a model of 40 million parameters")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_the_other_rank_needs_a_quarter_of_the_memory_at_most(tmp_path):
    """What it needs are its shards, half of the weights, which on a GPU are not in this memory."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8000, "n_embd": 512, "n_layer": 12, "n_head": 8, "n_positions": 64}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    assert model.num_parameters() > MILLIONS * 1_000_000
    weights = model.num_parameters() * 4 / 2**20  # MiB
    model.save_pretrained(tmp_path)
    del model
    work = partial(lambda: loaded(tmp_path, from_main()))
    first, second = without_errors(on_two_ranks(work, "fsdp2"))
    print(f"weights {weights:.0f} MiB; peaks: rank 0 {first[1]:.0f}, rank 1 {second[1]:.0f} MiB")
    assert first[1] > weights
    assert second[0] < 0.1 * weights
    assert second[1] < first[1] / 4
    assert second[1] < weights
    *_, gradients, loss = loaded(tmp_path, Accelerator(cpu=True))
    for *_, found, found_loss in (first, second):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert h.relative_error(found, gradients) < 1e-6
