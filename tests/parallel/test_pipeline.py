"""Pipeline stages of one process each train as one process does that holds the whole model."""

import copy
import os
import signal
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import helpers as h
import pytest
import torch
import transformers as tf
from forked import on_ranks, outcome, without_errors
from processes import SEED, make_accelerator, make_windows
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import hf_ga
from hf_ga.errors import ConfigError
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.order import epoch_order
from hf_ga.parallel.pipeline_model import PARTS, StageModel
from hf_ga.proof.sites import find_dropout_sites
from hf_ga.recovery.checkpoint import load_checkpoint, save_checkpoint
from hf_ga.recovery.latest import find_checkpoint

WINDOW, NUM_WINDOWS, LAST, MICRO_BATCH = 16, 5, 5, 3
DROPOUT = 0.1
FLOOR = 1e-6  # of the norm of all weights, or of the whole gradient
NUM_LAYERS = 3


def build_gpt2() -> nn.Module:
    return h.gpt2(DROPOUT, num_hidden_layers=NUM_LAYERS)


@h.seeded
def build_llama() -> nn.Module:
    sizes = {**h.LLAMA_SIZES, "num_hidden_layers": NUM_LAYERS}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, attention_dropout=DROPOUT))


def build_masked_lm() -> nn.Module:
    return h.bert_masked_lm(DROPOUT, num_hidden_layers=NUM_LAYERS)


def build_classifier() -> nn.Module:
    return h.bert_classifier(DROPOUT, num_hidden_layers=NUM_LAYERS)


MODELS = {
    "GPT-2": build_gpt2,
    "Llama": build_llama,
    "BERT masked LM": build_masked_lm,
    "BERT classifier": build_classifier,
}


def samples_of(name: str) -> list[dict]:
    """Ragged ones for some windows and a short last one; every fifth has no targets."""
    num_samples = WINDOW * (NUM_WINDOWS - 1) + LAST
    if name == "BERT classifier":
        return h.class_samples(num_samples)
    samples = h.token_samples(num_samples)
    return [h.without_targets(s) if i % 5 == 0 else s for i, s in enumerate(samples)]


def windows_of(accelerator: Any, samples: list[dict]) -> hf_ga.WindowLoader:
    sizes = {"per_device_batch_size": MICRO_BATCH, "global_batch_size": WINDOW}
    return make_windows(accelerator, samples, **sizes)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def weights_of(model: nn.Module) -> h.Gradients:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


@cache
def alone(name: str) -> tuple[h.Gradients, list[tuple]]:
    """Weights and results of all windows on one process, by `hf_ga.train_step`."""
    accelerator = make_accelerator("ddp")
    model = MODELS[name]()
    windows = windows_of(accelerator, samples_of(name))
    model, optimizer = hf_ga.prepare(accelerator, model, build_optimizer(model), windows)
    results = [
        hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        for window in windows
    ]
    return weights_of(model), [numbers_of(result) for result in results]


def numbers_of(result: hf_ga.StepResult) -> tuple:
    return result.loss, result.num_targets, result.grad_norm


@cache
def full_batch(name: str) -> h.Gradients:
    """The gradient of the first window in float64: one plain forward and backward, under the
    dropout of its samples.
    """
    model = MODELS[name]().double()
    samples = samples_of(name)
    dropout = find_dropout_sites(model, lambda n: model(**h.pad_right(samples[1:2] * n)))
    ids = epoch_order(len(samples), SEED, 0, True)[:WINDOW]
    positions = torch.arange(WINDOW).numpy()
    dropout.set_keys(sample_keys(SEED, 0, positions), window_key(SEED, 0, 0))
    with dropout.scope(model):
        h.mean_loss(model, h.pad_right([samples[i] for i in ids])).backward()
    return h.gradients(model)


def make_pipeline(
    name: str, num_stages: int, schedule: str, samples: list[dict] | None = None
) -> tuple[hf_ga.Pipeline, hf_ga.WindowLoader]:
    accelerator = make_accelerator("ddp")
    model = MODELS[name]()
    windows = windows_of(accelerator, samples or samples_of(name))
    rule = hf_ga.prove_targets(model, windows.probe_samples(64), h.pad_right)
    pipeline = hf_ga.prepare_pipeline(
        accelerator, model, windows, rule, num_stages=num_stages, schedule=schedule
    )
    return pipeline, windows


def train(
    name: str,
    num_stages: int,
    schedule: str,
    spoil: Callable[[hf_ga.Pipeline], None] = lambda pipeline: None,
) -> tuple[h.Gradients, h.Gradients, list[tuple]]:
    """The gradient of the first window, then weights and results of all windows, of this rank."""
    pipeline, windows = make_pipeline(name, num_stages, schedule)
    spoil(pipeline)
    pipeline.backward_window(next(iter(windows)))
    gradient = h.gradients(pipeline.model)
    pipeline.model.zero_grad()
    windows.set_epoch(0)
    optimizer = build_optimizer(pipeline.model)
    results = [pipeline.train_step(optimizer, window, max_grad_norm=1.0) for window in windows]
    return gradient, weights_of(pipeline.model), [numbers_of(result) for result in results]


def put_together(parts: list[h.Gradients]) -> h.Gradients:
    """Of all stages; copies of a tied weight must have the same bits."""
    whole: h.Gradients = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def errors_of(name: str, found: list[Any]) -> tuple[float, float]:
    """Relative errors of the gradient and of the weights after all windows."""
    gradients, weights, _ = zip(*found, strict=True)
    of_gradient = h.relative_error(put_together(gradients), full_batch(name))
    return of_gradient, h.relative_error(put_together(weights), alone(name)[0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_train_as_one_process(name, num_stages, schedule):
    """Gradient of a ragged window, and five updates of which the last one is of a short window, for
    which 1F1B with three stages has too few micro-batches.
    """
    alone(name)  # before the ranks are forked
    found = without_errors(on_ranks(partial(train, name, num_stages, schedule), num_stages))
    of_gradient, of_weights = errors_of(name, found)
    assert of_gradient < FLOOR
    assert of_weights < FLOOR
    for *_, results in found:
        for result, expected in zip(results, alone(name)[1], strict=True):
            assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["GPT-2", "BERT classifier"])
def test_two_stages_in_two_replicas(name):
    alone(name)
    found = without_errors(on_ranks(partial(train, name, 2, "1f1b"), 4))
    of_gradient, of_weights = errors_of(name, found)
    assert of_gradient < FLOOR
    assert of_weights < FLOOR


def scale_by_micro_batches(pipeline: hf_ga.Pipeline) -> None:
    """As torch's schedules do by default."""

    def schedule(stage: Any, num_calls: int, **options: Any) -> Schedule1F1B:
        return Schedule1F1B(stage, num_calls, **{**options, "scale_grads": True})

    pipeline._schedule = schedule


def number_sites_by_stage(pipeline: hf_ga.Pipeline) -> None:
    """Sites get the keys of a stage that counts its own modules from 0."""
    for number, site in enumerate(pipeline._engine.rule.dropout.sites.values()):
        site.key = number


def divide_by_own_targets(pipeline: hf_ga.Pipeline) -> None:
    """Each micro-batch gives its own mean."""
    engine = pipeline._engine
    engine.term = lambda outputs, is_whole: (outputs.loss, engine.call.counts)


def keep_copies_apart(pipeline: hf_ga.Pipeline) -> None:
    """The embedding does not get the gradient of the head."""
    pipeline._backend.tied = None


@pytest.mark.parametrize(
    "spoil",
    [scale_by_micro_batches, number_sites_by_stage, divide_by_own_targets],
)
def test_what_a_naive_pipeline_does_fails(spoil):
    """The control of the tests above."""
    alone("GPT-2")
    found = without_errors(on_ranks(partial(train, "GPT-2", 2, "1f1b", spoil), 2))
    of_gradient, of_weights = errors_of("GPT-2", found)
    assert of_gradient > 0.1
    assert of_weights > 100 * FLOOR


def test_copies_of_a_tied_weight_that_are_kept_apart_fail():
    found = without_errors(on_ranks(partial(train, "GPT-2", 2, "1f1b", keep_copies_apart), 2))
    first, last = (gradients["transformer.wte.weight"] for gradients, *_ in found)
    truth = full_batch("GPT-2")["transformer.wte.weight"]
    assert h.relative_error({"": first}, {"": truth}) > 0.1
    assert h.relative_error({"": last}, {"": truth}) > 0.1


def test_a_replica_without_samples():
    """A window of one sample, on two replicas; and one in which nothing has a target."""
    name, samples = "GPT-2", h.token_samples(2)

    def work() -> tuple[h.Gradients, int]:
        pipeline, windows = make_pipeline(name, 2, "1f1b", samples)
        (window,) = windows
        offsets = [torch.tensor([0]).numpy()] if pipeline.replica == 0 else []
        result = pipeline.backward_window(window.split(offsets))
        return h.gradients(pipeline.model), result.num_targets

    found = without_errors(on_ranks(work, 4))
    model = MODELS[name]()
    dropout = find_dropout_sites(model, lambda n: model(**h.pad_right(samples[:1] * n)))
    dropout.set_keys(sample_keys(SEED, 0, torch.arange(1).numpy()), window_key(SEED, 0, 0))
    first = samples[epoch_order(2, SEED, 0, True)[0]]
    with dropout.scope(model):
        h.mean_loss(model, h.pad_right([first])).backward()
    assert h.relative_error(put_together([g for g, _ in found]), h.gradients(model)) < FLOOR
    assert {n for _, n in found} == {h.num_targets(model, h.pad_right([first]))}


def test_a_window_without_targets_is_skipped():
    samples = [*h.token_samples(WINDOW), *map(h.without_targets, h.token_samples(WINDOW))]

    def work() -> list[bool]:
        pipeline, windows = make_pipeline("GPT-2", 2, "gpipe", samples)
        windows.shuffle = False
        optimizer = build_optimizer(pipeline.model)
        return [pipeline.train_step(optimizer, window).skipped for window in windows]

    assert on_ranks(work, 2) == [[False, True]] * 2


def test_killed_and_resumed_on_one_process(tmp_path):
    """And the other way round: the checkpoint of one process goes on in stages. Control: without
    the optimizer's state the weights differ.
    """
    name = "GPT-2"
    expected, _ = alone(name)

    def until_killed() -> None:
        pipeline, windows = make_pipeline(name, 2, "1f1b")
        accelerator = pipeline._backend.accelerator
        optimizer = build_optimizer(pipeline.model)
        for window in windows:
            pipeline.train_step(optimizer, window, max_grad_norm=1.0)
            if windows.num_consumed == 2:
                state = {"windows": windows.state_dict()}
                save_checkpoint(
                    accelerator, tmp_path, pipeline.model, optimizer, state, step=2, keep=2
                )
            if windows.num_consumed == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    said = on_ranks(until_killed, 2)
    assert all("EOFError" in one for one in said), said

    def resumed(with_moments: bool, last_window: int, keeps: bool = False) -> nn.Module:
        accelerator = make_accelerator("ddp")
        model = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all comes from the checkpoint
        windows = windows_of(accelerator, samples_of(name))
        optimizer = build_optimizer(model)
        folder = find_checkpoint(accelerator, tmp_path, "auto")
        state = load_checkpoint(folder, model, optimizer)
        if not with_moments:
            optimizer = build_optimizer(model)
        windows.load_state_dict(state["windows"])
        model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
        for window in windows:
            hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
            if window.index == last_window:
                break
        if keeps:
            state = {"windows": windows.state_dict()}
            save_checkpoint(accelerator, tmp_path, model, optimizer, state, step=4, keep=2)
        return model

    assert h.relative_error(weights_of(resumed(True, NUM_WINDOWS - 1)), expected) < FLOOR
    assert h.relative_error(weights_of(resumed(False, NUM_WINDOWS - 1)), expected) > 100 * FLOOR

    resumed(True, 3, keeps=True)

    def in_stages() -> h.Gradients:
        pipeline, windows = make_pipeline(name, 3, "gpipe")
        optimizer = build_optimizer(pipeline.model)
        folder = find_checkpoint(pipeline._backend.accelerator, tmp_path, "auto")
        state = load_checkpoint(folder, pipeline.model, optimizer)
        windows.load_state_dict(state["windows"])
        for window in windows:
            pipeline.train_step(optimizer, window, max_grad_norm=1.0)
        return weights_of(pipeline.model)

    found = without_errors(on_ranks(in_stages, 3))
    assert h.relative_error(put_together(found), expected) < FLOOR


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_are_loaded_without_a_pipeline(name, tmp_path):
    def work() -> None:
        pipeline, _ = make_pipeline(name, 2, "gpipe")
        pipeline.save_pretrained(tmp_path)

    without_errors(on_ranks(work, 2))
    model = MODELS[name]()
    loaded = type(model).from_pretrained(tmp_path)
    assert weights_of(loaded).keys() == weights_of(model).keys()
    assert all(torch.equal(w, weights_of(model)[n]) for n, w in weights_of(loaded).items())


def whole_model(name: str, num_layers: int) -> nn.Module:
    """A small model of a class that can be cut."""
    if name.startswith("Bert"):
        return h.seeded(h._bert)(getattr(tf, name), 0.0, num_hidden_layers=num_layers)
    if name.startswith("GPT2"):
        return h.gpt2(num_hidden_layers=num_layers)
    config = getattr(tf, name.replace("ForCausalLM", "Config"))
    sizes = {**h.LLAMA_SIZES, "num_hidden_layers": num_layers, "head_dim": 8}
    return h.seeded(getattr(tf, name))(
        config(**sizes, tie_word_embeddings=name == "Qwen2ForCausalLM")
    )


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("name", PARTS)
def test_stages_one_after_the_other_are_the_whole_model(name, num_stages):
    """The same bits of loss and gradients, and each parameter on one stage, or tied."""
    whole = whole_model(name, 5)
    samples = h.class_samples(4) if "Sequence" in name else h.tag_samples(4)
    batch = {**h.pad_right(samples), "token_type_ids": None}
    batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    if not name.startswith(("Bert", "GPT2")):
        del batch["token_type_ids"]
    stages = [StageModel(copy.deepcopy(whole), i, num_stages) for i in range(num_stages)]
    entries = batch
    for stage in stages[:-1]:
        entries = {**batch, "inputs_embeds": stage(**entries)}
    loss = stages[-1](**entries).loss
    expected = whole(**batch).loss
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    parts = [
        {n: p.grad for n, p in stage.model.named_parameters() if p is not stage.tied}
        for stage in stages
    ]
    gradients = put_together(parts)
    if (tied := stages[0].tied) is not None:
        other = stages[-1].tied
        name_of_tied = next(n for n, p in whole.named_parameters() if p.shape == tied.shape)
        gradients[name_of_tied] = tied.grad + other.grad
        assert torch.equal(tied, other) and tied is not other
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for path, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[path], parameter.grad)


def refused(model: nn.Module, samples: list[dict], num_stages: int = 2, **options: Any) -> str:
    """What `prepare_pipeline` says on one process."""
    accelerator = make_accelerator("ddp")
    windows = windows_of(accelerator, samples)
    how = {k: options.pop(k) for k in ("loss_fn",) if k in options}
    rule = hf_ga.prove_targets(model, samples, h.pad_right, **how)
    with pytest.raises(ConfigError) as error:
        hf_ga.prepare_pipeline(accelerator, model, windows, rule, num_stages=num_stages, **options)
    return str(error.value)


def checkpointed_gpt2() -> nn.Module:
    model = h.gpt2()
    model.gradient_checkpointing_enable()
    return model


def summed_logits(outputs: Any, batch: dict) -> tuple[torch.Tensor, int]:
    return outputs.logits.sum(), len(batch["labels"])


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (h.mixtral, {}, "unsupported model for a pipeline: MixtralForCausalLM"),
        (h.gpt2, {"num_stages": 3}, "got 3 stages for 2 layers"),
        (h.gpt2, {"num_stages": 1}, "between 2 and the number of layers"),
        (h.gpt2, {"schedule": "zigzag"}, "schedule must be one of gpipe, 1f1b, got 'zigzag'"),
        (h.gpt2, {"loss_fn": summed_logits}, "unsupported loss in a pipeline: loss_fn"),
        (h.gpt2, {}, "2 pipeline stages need a multiple of 2 processes, got 1"),
        (checkpointed_gpt2, {}, "gradient checkpointing in a pipeline"),
    ],
)
def test_unsupported_settings_are_refused_by_name(model, options, words):
    assert words in refused(model(), h.token_samples(8), **options)


def test_weights_that_differ_between_ranks_are_refused():
    def work() -> str:
        accelerator = make_accelerator("ddp")
        model = h.gpt2()
        with torch.no_grad():
            model.lm_head.weight += accelerator.process_index
        windows = windows_of(accelerator, h.token_samples(8))
        rule = hf_ga.prove_targets(model, windows.probe_samples(8), h.pad_right)
        make = partial(hf_ga.prepare_pipeline, accelerator, model, windows, rule, num_stages=2)
        return outcome(make)

    for said in on_ranks(work, 2):
        assert "must have the same weights" in said
