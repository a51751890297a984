"""The promises at the sizes of GPT-2-small and BERT-base where there is a GPU, and tiny elsewhere;
`scripts/gpu_report.py` shows what these tests print.
"""

import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from benchmark.gpu import median_seconds as seconds_of
from benchmark.report import MIN_TIME_GAIN
from benchmark.setting import Setting, build_model
from common import collate
from steps import backward_window, train_step
from torch.nn.utils.rnn import pad_sequence
from tried import later, tried

import hf_ga
from hf_ga.engine.speed_ups import candidates
from hf_ga.parallel.prepare import enable_fp16_on_cpu
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.rows.packing import Packing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, LENGTHS = ("base", (8, 64)) if DEVICE == "cuda" else ("tiny", (4, 16))
NEEDS_CUDA = pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
CASES = (
    [(m, p) for m in ("gpt", "bert") for p in ("no", "bf16", "fp16")]
    if DEVICE == "cuda"
    else [("gpt", "no"), ("bert", "bf16")]
)
EVERYWHERE = pytest.mark.parametrize(("model", "precision"), CASES)
pytestmark = pytest.mark.report


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(DEVICE == "cpu").lower())
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    AcceleratorState._reset_state(True)
    assert torch.get_float32_matmul_precision() == "highest"  # no TF32
    yield
    torch.use_deterministic_algorithms(False)
    AcceleratorState._reset_state(True)


def setting_of(
    model: str, precision: str = "no", dropout: float = 0.1, lengths: tuple[int, int] = LENGTHS
) -> Setting:
    rng = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(rng.integers(*lengths, 16).tolist()):
        label = {"label": i % 2} if model == "bert" else {}
        samples.append({"id": i, "input_ids": rng.integers(5, 4000, length).tolist(), **label})
    sizes = {"window_size": 4, "micro_batch_size": 2, "max_length": 512}
    return Setting(
        model, SIZE, DEVICE, mixed_precision=precision, dropout=dropout, samples=samples, **sizes
    )


def check(setting: Setting, **more) -> None:
    precision = {"no": "fp32"}.get(setting.mixed_precision, setting.mixed_precision)
    report = hf_ga.check_equivalence(
        build_model(setting), setting.samples, collate, precision=precision, **more
    )
    print(f"{setting.model}, {precision}, dropout {setting.dropout}: {report.verdict('hf_ga')}")
    assert report.passed, report


@EVERYWHERE
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_promise_1_or_with_dropout_2(model, precision, dropout):
    """Same update, and with dropout same randomness: the oracle draws the same masks in float64."""
    check(setting_of(model, precision, dropout))


@EVERYWHERE
def test_promise_of_the_same_bits(model, precision):
    torch.use_deterministic_algorithms(True)
    check(setting_of(model, precision), layouts=["even"], same_bits=4)


@EVERYWHERE
def test_promise_3(model, precision, tmp_path):
    """Four steps, and the last two again by new objects; that of whole runs kills processes.
    Control: the state in between.
    """
    torch.use_deterministic_algorithms(True)
    whole, between = trained(setting_of(model, precision), tmp_path, resumes=False)
    again, _ = trained(setting_of(model, precision), tmp_path, resumes=True)
    assert again == whole != between
    print(f"{model}, {precision}: SHA-256 of the weights {whole[:16]} with and without a stop")


def trained(setting, folder, resumes):
    """SHA-256 of the weights after the last step, and after the second."""
    accelerator = Accelerator(cpu=DEVICE == "cpu", mixed_precision=setting.mixed_precision)
    enable_fp16_on_cpu(accelerator)
    sizes = {
        "per_device_batch_size": setting.micro_batch_size,
        "global_batch_size": setting.window_size,
    }
    windows = hf_ga.WindowLoader(setting.samples, collate, accelerator=accelerator, **sizes)
    model = build_model(setting)
    model, optimizer = hf_ga.prepare(
        accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    accelerator.register_for_checkpointing(windows)
    if resumes:
        accelerator.load_state(str(folder))
    hashes = []
    for window in windows:
        train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        hashes.append(state_sha256(model.state_dict()))
        if windows.num_consumed == 2:
            accelerator.save_state(str(folder))
    assert len(hashes) == (2 if resumes else 4)
    AcceleratorState._reset_state(True)
    return hashes[-1], hashes[1]


@NEEDS_CUDA
def test_a_step_waits_for_the_device_at_most_once():
    setting = setting_of("gpt", "bf16")
    accelerator = Accelerator(mixed_precision="bf16")
    windows = hf_ga.WindowLoader(
        setting.samples,
        collate,
        accelerator=accelerator,
        per_device_batch_size=2,
        global_batch_size=4,
    )
    model = build_model(setting)
    model, optimizer = hf_ga.prepare(
        accelerator, model, torch.optim.AdamW(model.parameters(), fused=True)
    )
    waits = []
    for window in windows:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(
            Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message))
        )
    print(
        "waits in each step (the first three have rehearsals): "
        f"{[sum(found.values()) for found in waits]}, target <= 1; {waits[-1]}"
    )
    assert sum(waits[-1].values()) <= 1


@NEEDS_CUDA
@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_packed_layers_are_proven_and_timed(model, kernel):
    """Rule: packing, or the kernel, becomes the default on a GPU if it is worth 5 % of the time for
    both models.
    """
    if kernel == "flash_attention_2":
        pytest.importorskip("flash_attn")
    seconds = {}
    for name, attention, speed_ups in [
        ("default", "sdpa", []),
        (kernel, kernel, []),
        (f"packing, {kernel}", kernel, [Packing()]),
    ]:
        setting = setting_of(model, "bf16", 0.0, lengths=(8, 512))
        accelerator = Accelerator(mixed_precision="bf16")
        built = build_model(setting)
        built.set_attn_implementation(attention)
        speed_ups = [*candidates(built), *speed_ups]
        found = tried(built, setting.samples, collate, speed_ups)
        sizes = {"per_device_batch_size": 16, "global_batch_size": 16}
        (window,) = hf_ga.WindowLoader(setting.samples, collate, accelerator=accelerator, **sizes)
        prepared = accelerator.prepare(built)
        seconds[name] = seconds_of(
            partial(backward_window, accelerator, prepared, later(window)), setting
        )
        print(
            f"{model}, {name}: {1000 * seconds[name]:.1f} ms, left out: "
            f"{found.left_out or 'nothing'}"
        )
        assert (
            not any(isinstance(speed_up, Packing) for speed_up in speed_ups)
            or "packing" not in found.left_out
        )
    for name in [*seconds][1:]:
        gain = seconds["default"] / seconds[name]
        verdict = "yes" if gain >= MIN_TIME_GAIN else "no, stays opt-in"
        print(
            f"default on a GPU? {model}, {name}: {gain:.3f} of the speed without, from "
            f"{MIN_TIME_GAIN} on for both models: {verdict}"
        )


@NEEDS_CUDA
@pytest.mark.parametrize("name", ["torch", "flash_attn"])
def test_a_packed_kernel_is_padded_attention(name):
    """Causal attention in bf16, against float32. The time is that of forward and backward."""
    if name == "flash_attn":
        kernel = pytest.importorskip("flash_attn").flash_attn_varlen_func
        more = {"causal": True}
    else:
        kernel = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
        more = {"window_size": (-1, 0)}
    lengths = np.random.default_rng(0).integers(8, 512, 64).tolist()
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    parts = [
        torch.randn(sum(lengths), 12, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]

    def packed(q, k, v):
        return kernel(q, k, v, ends, ends, max(lengths), max(lengths), **more)

    def padded(*qkv):
        q, k, v = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in qkv)
        rows = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])

    def error_and_time(attend):
        error = float((attend(*parts).detach() - right).norm() / right.norm())
        return error, 1000 * seconds_of(lambda: attend(*parts).sum().backward(), setting_of("gpt"))

    right = padded(*(x.detach().float() for x in parts))
    (error, ms), (padded_error, padded_ms) = error_and_time(packed), error_and_time(padded)
    print(
        f"{name}: error {error:.1e}, {ms:.3f} ms; padded: error {padded_error:.1e}, "
        f"{padded_ms:.3f} ms"
    )
    assert error <= 2 * padded_error + 1e-6
