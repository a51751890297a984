"""check_equivalence: its truth against plain torch, its verdicts on right and slightly wrong steps,
what it leaves untouched.
"""

import copy
import itertools
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import hf_ga
from hf_ga.check.layouts import AUTO, choose_layouts, local_micro_batches
from hf_ga.check.steps import make_accelerator, own_accelerate_state
from hf_ga.check.verdict.rows import OURS
from hf_ga.errors import ConfigError

MODELS = {
    "gpt2": (helpers.gpt2, helpers.token_samples),
    "xlnet": (helpers.xlnet_classifier, helpers.class_samples),
    "no transformers model": (helpers.plain_tagger, helpers.plain_samples),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_of_hf_ga_passes_with_dropout(name):
    build, samples = MODELS[name]
    report = check(build(0.1), samples(12))
    assert report.passed, report
    assert [row.layout for row in report.rows] == list(AUTO)
    assert 0 < report.max_error < 2e-6


def check(model, samples, layouts="auto", **more):
    return hf_ga.check_equivalence(model, samples, helpers.pad_right, layouts, **more)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_row_of_the_same_bits_sees_a_model_whose_bits_change(deterministic):
    """Its logits grow by one rounding per forward, which no limit of another row sees."""
    model = helpers.bert_classifier()
    number = itertools.count()
    if not deterministic:
        model.classifier.register_forward_hook(
            lambda module, args, logits: logits * (1 + 1.2e-7 * next(number))
        )
    *others, bits = check(model, helpers.class_samples(12), ["even"], same_bits=2).rows
    assert all(row.passed for row in others)
    assert bits.layout == "bits"
    assert bits.passed == deterministic == (not bits.causes)


def leaving(gradients, loss=None):
    """A step that leaves given gradients, whatever it is given."""

    def step(model, micro_batches):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].to(parameter.dtype).clone()
        return loss

    return step


@pytest.mark.parametrize(
    ("build", "samples"), [MODELS["gpt2"], (helpers.bert_classifier, helpers.class_samples)]
)
def test_the_truth_is_that_of_plain_torch_in_float64(build, samples):
    model = build(0.0)
    window = samples(12)
    batch = helpers.pad_right(window)
    truth = helpers.full_batch_gradient(model, batch)
    own = helpers.relative_error(helpers.full_batch_gradient(model, batch, torch.float32), truth)
    nudged = {key: value * (1 + 1e-5) for key, value in truth.items()}
    loss = float(helpers.mean_loss(copy.deepcopy(model).double(), batch).detach())
    steps = {
        "right": leaving(truth, loss),
        "scaled": leaving(nudged),
        "wrong loss": leaving(truth, loss * 1.001),
    }
    report = check(model, window, {"halves": [6, 6]}, steps=steps)
    right, scaled, wrong_loss = (report.arm(arm).rows[0] for arm in steps)
    assert right.passed and right.error < 1e-7  # rounded once to float32
    assert right.loss_error < 1e-7
    assert abs(right.norm_ratio - 1) < 1e-7
    assert right.own_error == pytest.approx(own, rel=0.3)
    assert right.limit == pytest.approx(2 * right.own_error + 1e-6)
    assert not scaled.passed
    assert scaled.error == pytest.approx(1e-5, rel=0.02)
    assert scaled.norm_ratio == pytest.approx(1 + 1e-5)
    assert not wrong_loss.passed
    assert wrong_loss.loss_error == pytest.approx(1e-3, rel=1e-3)


NAME = "bert.encoder.layer.0.attention.self.query.weight"


def raising(model, micro_batches):
    raise KeyError("lost")


@pytest.fixture(scope="module")
def nearly_right():
    """name -> the row of a step that is right but for one thing."""
    model = helpers.bert_classifier()
    window = helpers.class_samples(12)
    batch = helpers.pad_right(window)
    truth = helpers.full_batch_gradient(model, batch)
    own = helpers.relative_error(helpers.full_batch_gradient(model, batch, torch.float32), truth)
    # Of all together 1e-6 + 2 x own is allowed, of this one hardly more than 1e-6.
    nudge = (1e-6 + 1.5 * own) * helpers.norm(truth) * torch.full((16, 16), 1 / 16).double()
    steps = {
        "parameter": leaving({**truth, NAME: truth[NAME] + nudge}),
        "nan": leaving({**truth, "classifier.bias": truth["classifier.bias"] * float("nan")}),
        "number": leaving(truth, loss=1.0),
        "raising": raising,
    }
    report = check(model, window, {"halves": [6, 6]}, steps=steps)
    assert report.arm(OURS).passed
    assert not any(report.arm(arm).passed for arm in steps)
    return {arm: report.arm(arm).rows[0] for arm in steps}


def test_one_wrong_parameter_fails_although_the_whole_passes(nearly_right):
    row = nearly_right["parameter"]
    assert row.error <= row.limit, (row.error, row.limit)
    assert row.worst_parameter == NAME
    assert row.worst_share > 1.05


def test_a_nan_fails(nearly_right):
    row = nearly_right["nan"]
    assert row.worst_parameter == "classifier.bias"
    assert [cause.name for cause in row.causes] == ["not finite"]


def test_a_right_gradient_with_a_wrong_number_is_told_so(nearly_right):
    assert [cause.name for cause in nearly_right["number"].causes] == ["reported loss"]


def test_a_step_that_raises_does_not_lose_the_others(nearly_right):
    assert nearly_right["raising"].refused == "raised KeyError: 'lost'"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision):
    naive = naive_in(torch.bfloat16 if precision == "bf16" else torch.float16)
    samples = helpers.token_samples(12)
    report = check(
        helpers.bert_masked_lm(0.1), samples, ["uneven"], precision=precision, steps={"step": naive}
    )
    assert report.arm(OURS).passed and not report.arm("step").passed, report
    assert 1e-4 < report.arm(OURS).max_error < 2e-2  # it is computed in that precision


def naive_in(dtype):
    """A mean of means; under autocast where the type is not float32."""

    def step(model, micro_batches):
        for batch in micro_batches:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = model(**batch).loss
            (loss / len(micro_batches)).backward()

    return step


def test_a_collate_function_that_draws_masks():
    def collate(samples):
        batch = helpers.pad_right(samples)
        hidden = torch.rand(batch["labels"].shape) < 0.4
        return {**batch, "labels": batch["labels"].masked_fill(hidden, helpers.IGNORED)}

    assert hf_ga.check_equivalence(
        helpers.bert_masked_lm(0.1), helpers.token_samples(16), collate, ["uneven"]
    ).passed


def moving(model, micro_batches):
    """A step that changes everything it can reach: weights, modes, random states, Accelerate's
    state.
    """
    torch.rand(3), np.random.rand(3)
    Accelerator(gradient_accumulation_steps=7, mixed_precision="bf16")
    for batch in micro_batches:
        model.eval()(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_everything_is_left_as_found():
    """Also the training mode of each module; the copy is put into training mode."""
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = helpers.bert_classifier(0.1).eval()
    model.bert.pooler.train()
    model.classifier.bias.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    before = helpers.everything(model)
    shared = dict(accelerator.state._shared_state)
    report = check(model, helpers.class_samples(12), ["even"], steps={"step": moving})
    assert report.arm(OURS).passed
    assert not report.arm("step").passed
    assert helpers.everything(model) == before
    assert accelerator.state._shared_state == shared
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.mixed_precision == "no"


def test_a_prepared_model_is_checked_without_its_autocast():
    with own_accelerate_state():
        accelerator = Accelerator(mixed_precision="bf16")
        model = accelerator.prepare(helpers.bert_classifier())
        before = helpers.everything(model)
        report = check(model, helpers.class_samples(12), ["even"])
        assert report.passed and report.max_error < 1e-6  # float32 was asked for
        assert helpers.everything(model) == before
        assert accelerator.mixed_precision == "bf16"


def test_a_model_that_cannot_compute_in_float64_is_refused():
    def only_float32(tagger, args):
        if tagger.hidden.weight.dtype == torch.float64:
            raise RuntimeError("no kernel for Double")

    model = helpers.plain_tagger()
    model.register_forward_pre_hook(only_float32)
    with pytest.raises(
        ConfigError, match=r"in float64, but this failed: no kernel for Double. Pass fewer samples"
    ):
        check(model, helpers.plain_samples(12), ["uneven"])


class Noisy(nn.Module):
    """Adds noise that no sample has."""

    def __init__(self, draw):
        super().__init__()
        self.tagger = helpers.PlainTagger(0.1)
        self.noise = Noise(draw)

    def forward(self, input_ids, labels):
        return (
            self.tagger(input_ids, labels) + self.noise(self.tagger.hidden.weight).square().mean()
        )


class Noise(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x + self.draw(x) if self.training else x


def of_numpy(weight):
    return torch.from_numpy(np.random.rand(*weight.shape)).to(weight)


def test_what_cannot_be_keyed_is_refused_or_left_out():
    model = helpers.seeded(Noisy)(of_numpy)
    refused = check(model, helpers.plain_samples(12), ["even"], steps={"step": plain_tagger_step})
    assert refused.rows[0].refused
    assert [cause.name for cause in refused.causes()] == ["randomness"]
    assert {cause.name for cause in refused.causes("step")} == {"normalisation", "dropout"}
    assert check(
        model, helpers.plain_samples(12), ["even"], allow_split_dependent_randomness=True
    ).passed
    assert model.noise.training


def plain_tagger_step(model, micro_batches):
    """The model's noise is off: it is compared without."""
    model.noise.eval()
    for batch in micro_batches:
        model(**batch).backward()


def test_noise_of_a_window_is_keyed_and_a_step_that_draws_its_own_is_told_so():
    """Torch's noise on weights is shared by the samples of a window."""

    def right(model, micro_batches):
        total = sum(int((batch["labels"] != helpers.IGNORED).sum()) for batch in micro_batches)
        for batch in micro_batches:
            n = int((batch["labels"] != helpers.IGNORED).sum())
            (model(**batch) * n / total).backward()

    model = helpers.seeded(Noisy)(lambda weight: torch.rand_like(weight))
    model.tagger.dropout = nn.Identity()
    report = check(model, helpers.plain_samples(12), ["even"], steps={"step": right})
    assert report.arm(OURS).passed, report
    (cause,) = report.causes("step")
    assert cause.name == "randomness"
    assert cause.text.startswith("rand_like (") and "test_equivalence.py" in cause.text


class NoisyTagger(nn.Module):
    """Scales embeddings by noise of each token."""

    def __init__(self, draw):
        super().__init__()
        self.tagger = helpers.PlainTagger()
        self.draw = draw

    def forward(self, input_ids, labels):
        tagger = self.tagger
        embedded = tagger.embedding(input_ids)
        logits = tagger.output(torch.tanh(tagger.hidden(embedded * self.draw(embedded))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=helpers.IGNORED)


NOISES = {
    "normal": lambda x: torch.randn_like(x),
    "of any type": lambda x: torch.randn(x.shape, dtype=torch.float32, device=x.device).to(x),
    "uniform": lambda x: torch.rand_like(x),
    "in place": lambda x: torch.empty_like(x).normal_(),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
}


@pytest.mark.parametrize("name", NOISES)
def test_the_reference_has_the_same_noise_in_float64(name):
    """Otherwise the full batch's own error, and with it the limit, would be about 1."""
    model = helpers.seeded(NoisyTagger)(NOISES[name])
    (row,) = check(model, helpers.plain_samples(12), ["uneven"]).rows
    assert row.passed, row
    assert row.own_error < 1e-6


def test_a_gradient_that_rounding_changes_is_refused():
    """Its limit would be larger than itself."""
    chaos = helpers.seeded(NoisyTagger)(lambda x: torch.frac(x.detach() * 1e9))
    with pytest.raises(ConfigError, match="against float64, so a wrong one could not be told"):
        check(chaos, helpers.plain_samples(12), ["uneven"])


def test_samples_without_targets():
    """The shortest sample is one of them, so its gradient does not show what padding does."""
    samples = helpers.token_samples(8)
    shortest = min(range(8), key=lambda index: len(samples[index]["input_ids"]))
    for index in {3, 7, shortest}:
        samples[index] = helpers.without_targets(samples[index])
    report = check(
        helpers.gpt2(0.1), samples, ["one by one"], steps={"step": naive_in(torch.float32)}
    )
    assert report.arm(OURS).passed
    assert not report.arm("step").passed
    assert {cause.name for cause in report.causes("step")} == {"normalisation", "dropout"}


def test_layouts_by_name_and_by_sizes():
    lengths = np.array([9, 3, 5, 7, 1, 8, 2, 6, 4, 10, 12, 11])
    layouts = {layout.name: layout for layout in choose_layouts("auto", lengths)}
    assert {name: layout.sizes for name, layout in layouts.items()} == {
        "even": [3, 3, 3, 3],
        "uneven": [5, 1, 4, 2],
        "one by one": [1] * 12,
        "sorted by length": [3, 3, 3, 3],
        "short last window": [1, 1],
    }
    assert (
        np.concatenate(layouts["sorted by length"].offsets).tolist() == np.argsort(lengths).tolist()
    )
    assert layouts["short last window"].accumulation_steps == 4
    assert [layout.sizes for layout in choose_layouts({"own": [5, 7]}, lengths)] == [[5, 7]]


@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_layouts_of_several_processes(num_processes):
    """Two micro-batches for each process in a full window, one in a short one, and a number that
    cannot be dealt out evenly.
    """
    lengths = np.arange(64)
    layouts = {layout.name: layout for layout in choose_layouts("auto", lengths, num_processes)}
    assert list(layouts) == [*AUTO, "indivisible"]
    for name, layout in layouts.items():
        members = np.concatenate(layout.offsets)
        assert sorted(members) == list(range(len(members)))
        assert (len(members) == 64) == (name != "short last window")
        steps = -(-layout.accumulation_steps // num_processes)  # of a process
        assert min(layout.sizes) > 0
        assert steps == (-(-64 // num_processes) if name == "one by one" else 2)
    assert len(layouts["short last window"].sizes) == num_processes
    assert len(layouts["indivisible"].sizes) % num_processes
    with pytest.raises(ConfigError, match="at least"):
        choose_layouts("auto", lengths[: 2 * len(layouts["even"].sizes) - 1], num_processes)


def test_micro_batches_are_dealt_out_in_turn():
    accelerator = make_accelerator(helpers.bert_classifier(), "fp32")
    loader = hf_ga.WindowLoader(
        helpers.class_samples(5),
        helpers.pad_right,
        accelerator=accelerator,
        global_batch_size=5,
        shuffle=False,
    )
    whole = next(iter(loader)).split([np.array(part) for part in ([0, 3], [1], [4, 2])])
    shares = [
        local_micro_batches(whole, SimpleNamespace(process_index=rank, num_processes=2))
        for rank in (0, 1)
    ]
    assert [[m.positions.tolist() for m in share.micro_batches] for share in shares] == [
        [[0, 3], [4, 2]],
        [[1]],
    ]
    assert [share.request.max_micro_batches for share in shares] == [2, 2]
    assert shares[1].num_samples == 5


BAD = {
    "few samples": ({"samples": 7}, "at least 8 samples, got 7"),
    "unknown layout": ({"layouts": ["odd"]}, "auto, some of even"),
    "no layout": ({"layouts": []}, "auto, some of even.*got .."),
    "sizes": ({"layouts": {"own": [5, 5]}}, "have .5, 5. samples, but must add up to 12"),
    "precision": ({"precision": "fp8"}, "one of fp32, bf16, fp16, got 'fp8'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_before_any_work(case):
    arguments, message = BAD[case]
    model = helpers.bert_classifier()
    model.forward = None  # any forward would fail
    samples = helpers.class_samples(arguments.pop("samples", 12))
    with pytest.raises(ConfigError, match=message):
        check(model, samples, **arguments)
