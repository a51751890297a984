"""Two pipeline stages train as one process that holds the whole model, and what is refused.

`test_pipeline_processes.py` has more stages, schedules, replicas and models.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import helpers as h
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from accelerate.utils import DistributedType
from forked import on_ranks, outcome, without_errors
from pipelines import (
    FLOOR,
    MODELS,
    WINDOW,
    alone,
    assert_trains_as_one_process,
    build_optimizer,
    errors_of,
    full_batch,
    full_gradient,
    kill_two_stages,
    make_pipeline,
    one_process_with,
    put_together,
    train,
    weights_of,
    windows_of,
)
from processes import make_accelerator
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import hf_ga
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import ConfigError
from hf_ga.pipeline.model import SUPPORTED_MODELS, StageModel
from hf_ga.pipeline.pipeline import weights_index

SLOW = pytest.mark.slow("starts processes, as for the models before")


@pytest.mark.parametrize(
    "name",
    [
        "GPT-2",
        *(pytest.param(name, marks=SLOW) for name in MODELS if name != "GPT-2"),
    ],
)
def test_two_stages_train_as_one_process(name):
    assert_trains_as_one_process(name, num_stages=2, schedule="1f1b")


@pytest.mark.slow("trains on several processes")
def test_fewer_micro_batches_than_stages():
    """The short last window has fewer micro-batches than 1F1B needs for three stages. BERT's
    backwards need its buffers (indices of positions).
    """
    assert_trains_as_one_process("BERT classifier", num_stages=3, schedule="1f1b")


@pytest.mark.slow("trains on several processes")
def test_two_stages_in_two_replicas():
    assert_trains_as_one_process("GPT-2", num_stages=2, schedule="1f1b", num_replicas=2)


def scale_by_micro_batches(pipeline: hf_ga.Pipeline) -> None:
    """As torch's schedules do by default."""

    def schedule(stage: Any, num_calls: int, **options: Any) -> Schedule1F1B:
        return Schedule1F1B(stage, num_calls, **{**options, "scale_grads": True})

    pipeline._loop.schedule = schedule


def number_draws_by_stage(pipeline: hf_ga.Pipeline) -> None:
    """Each stage counts its draws from 0."""
    loop = pipeline._loop
    loop._last_draw -= loop.engine.draws.first_draw
    loop.engine.draws.first_draw = 0


def divide_by_own_targets(pipeline: hf_ga.Pipeline) -> None:
    """Each micro-batch gives its own mean."""
    pipeline._backend.run_backward = lambda loss, hooks, retain_graph: None


def keep_copies_apart(pipeline: hf_ga.Pipeline) -> None:
    """The embedding does not get the gradient of the head."""
    pipeline._backend.tied = None


@pytest.mark.slow("trains on several processes")
def test_what_a_naive_pipeline_does_fails():
    """The control of the tests above."""
    alone("GPT-2")
    naive = [scale_by_micro_batches, number_draws_by_stage, divide_by_own_targets]

    def work() -> list[tuple]:
        return [train("GPT-2", 2, "1f1b", spoil) for spoil in [*naive, keep_copies_apart]]

    *found, apart = zip(*without_errors(on_ranks(work, 2)), strict=True)
    for spoil, ranks in zip(naive, found, strict=True):
        of_gradient, of_weights = errors_of("GPT-2", ranks)
        assert of_gradient > 0.1, spoil
        assert of_weights > 100 * FLOOR, spoil
    first, last = (gradients["transformer.wte.weight"] for gradients, *_ in apart)
    truth = full_batch("GPT-2")["transformer.wte.weight"]
    assert h.relative_error({"": first}, {"": truth}) > 0.1
    assert h.relative_error({"": last}, {"": truth}) > 0.1


def test_a_replica_without_samples():
    """Control: a window of which a sample is left out is refused."""
    name = "GPT-2"
    samples = h.token_samples(3)

    def work() -> tuple[h.Gradients, int, str]:
        pipeline, windows = make_pipeline(name, 2, "1f1b", samples)
        (window,) = windows
        all_here = [np.array([0, 1]), np.array([2])]
        all_but_one = [np.array([0, 1])]
        if pipeline.replica == 1:
            all_here = all_but_one = []
        result = pipeline.backward_window(window.split(all_here))
        gradients = h.gradients(pipeline.model)
        said = outcome(partial(pipeline.backward_window, window.split(all_but_one)))
        return gradients, result.num_targets, said

    gradients, numbers, said = zip(*without_errors(on_ranks(work, 4)), strict=True)
    assert len(set(numbers)) == 1
    assert h.relative_error(put_together(gradients), full_gradient(name, samples, 3)) < FLOOR
    assert all("ConfigError: some samples of the window were computed twice" in s for s in said)


def test_micro_batches_without_targets_add_nothing():
    """Their losses are 0 / 0. Control: the sum of the micro-batches' own means is another one."""
    samples = h.token_samples(WINDOW)
    samples = [h.without_targets(s) if 2 < i < 12 else s for i, s in enumerate(samples)]

    def work() -> tuple[h.Gradients, h.Gradients, float]:
        pipeline, windows = make_pipeline("GPT-2", 2, "1f1b", samples)
        windows.shuffle = False
        (window,) = windows
        loss = pipeline.backward_window(window).loss
        ours = h.gradients(pipeline.model)
        pipeline.model.zero_grad()
        divide_by_own_targets(pipeline)
        pipeline.backward_window(window)
        return ours, h.gradients(pipeline.model), loss

    ours, naive, losses = zip(*without_errors(on_ranks(work, 2)), strict=True)
    truth = full_gradient("GPT-2", samples, WINDOW, shuffle=False)
    assert h.relative_error(put_together(ours), truth) < FLOOR
    assert h.relative_error(put_together(naive), truth) > 0.1
    assert all(map(math.isfinite, losses))


def test_class_weights():
    """Of a loss function of the model's own. Control: the mean of the micro-batches' own means."""
    name = "weighted GPT-2"

    def work() -> tuple[h.Gradients, h.Gradients]:
        pipeline, windows = make_pipeline(name, 2, "1f1b")
        window = next(iter(windows))
        result = pipeline.backward_window(window)
        ours = h.gradients(pipeline.model)
        pipeline.model.zero_grad()
        divide_by_own_targets(pipeline)
        pipeline.backward_window(window)
        factor = result.num_targets / len(window.micro_batches)
        sums = h.gradients(pipeline.model)
        return ours, {name: factor * gradient for name, gradient in sums.items()}

    ours, naive = zip(*without_errors(on_ranks(work, 2)), strict=True)
    assert h.relative_error(put_together(ours), full_batch(name)) < FLOOR
    assert h.relative_error(put_together(naive), full_batch(name)) > 0.1


def test_micro_batches_are_padded_to_their_window_if_a_divisor_needs_it():
    """The trial finds it. If it had not, all ranks would compute the window again, because the last
    stage finds it; the next window is padded at once.
    """
    name = "GPT-2 over positions"

    def work() -> list[tuple[h.Gradients, bool]]:
        pipeline, windows = make_pipeline(name, 2, "1f1b")
        assert windows.state.pad_to_window
        windows.state.pad_to_window = False
        window = next(iter(windows))
        found = []
        for _ in range(2):
            pipeline.model.zero_grad()
            pipeline.backward_window(window)
            found.append((h.gradients(pipeline.model), windows.state.pad_to_window))
        return found

    for ranks in zip(*without_errors(on_ranks(work, 2)), strict=True):
        gradients, are_padded = zip(*ranks, strict=True)
        assert all(are_padded)
        assert h.relative_error(put_together(gradients), full_batch(name)) < FLOOR


def test_a_window_without_targets_is_skipped():
    samples = [*h.token_samples(WINDOW), *map(h.without_targets, h.token_samples(WINDOW))]

    def work() -> list[bool]:
        pipeline, windows = make_pipeline("GPT-2", 2, "gpipe", samples)
        windows.shuffle = False
        optimizer = build_optimizer(pipeline.model)
        return [pipeline.train_step(optimizer, window).skipped for window in windows]

    assert on_ranks(work, 2) == [[False, True]] * 2


@pytest.mark.parametrize("clip", [None, 1.0])
def test_no_stage_is_updated_if_one_is_not_finite(clip):
    def work() -> tuple[str, bool]:
        pipeline, windows = make_pipeline("GPT-2", 2, "1f1b")
        if pipeline.stage == 1:
            pipeline.model.transformer.ln_f.weight.register_hook(lambda grad: grad * torch.inf)
        before = weights_of(pipeline.model)
        optimizer = build_optimizer(pipeline.model)
        window = next(iter(windows))
        said = outcome(partial(pipeline.train_step, optimizer, window, max_grad_norm=clip))
        after = weights_of(pipeline.model)
        return said, all(torch.equal(after[name], weight) for name, weight in before.items())

    for said, is_unchanged in on_ranks(work, 2):
        assert "NonFinite: the loss or a gradient of window 0 of epoch 0" in said
        assert is_unchanged


@pytest.mark.parametrize(("failing", "schedule"), [(0, "1f1b"), (2, "gpipe")])
def test_a_stage_that_fails_in_a_forward_ends_all(failing, schedule):
    """In its second micro-batch; the other stages name its error, and no stage is updated."""

    def work() -> tuple[str, bool]:
        pipeline, windows = make_pipeline("GPT-2", 3, schedule)
        forwards = []

        def fail_in_second(*args: Any) -> None:
            forwards.append(args)
            if len(forwards) == 2:
                raise torch.OutOfMemoryError("on purpose")

        if pipeline.stage == failing:
            pipeline.model.register_forward_pre_hook(fail_in_second)
        return step_outcome(pipeline, next(iter(windows)))

    found = without_errors(on_ranks(work, 3))
    for stage, (said, is_unchanged) in enumerate(found):
        start = "" if stage == failing else f"ProcessFailed: process {failing} failed: "
        assert said.startswith(f"{start}OutOfMemory: ")
        assert "In a pipeline it cannot be split" in said
        assert is_unchanged


def step_outcome(pipeline: hf_ga.Pipeline, window: hf_ga.Window) -> tuple[str, bool]:
    """What a training step says, and whether it left the weights as they were."""
    before = weights_of(pipeline.model)
    optimizer = build_optimizer(pipeline.model)
    said = outcome(partial(pipeline.train_step, optimizer, window))
    after = weights_of(pipeline.model)
    return str(said), all(torch.equal(after[name], weight) for name, weight in before.items())


def turn_off_a_dropout(model: nn.Module) -> None:
    model.transformer.h[2].mlp.dropout.p = 0.0


def change_loss(model: nn.Module, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """change: (loss, logits) -> another loss."""
    loss_of = model.loss_function

    def changed(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return change(loss_of(logits, *args, **kwargs), logits)

    model.loss_function = changed


def square_the_loss(model: nn.Module) -> None:
    change_loss(model, lambda loss, logits: loss**2)


def detach_the_loss(model: nn.Module) -> None:
    """A backward of it would raise an error while the first stage waits for gradients."""
    change_loss(model, lambda loss, logits: loss.detach())


def divide_by_a_constant(model: nn.Module) -> None:
    change_loss(model, lambda loss, logits: loss.logsumexp(0) * 0 + logits.sum() / 1000)


def add_a_mean_over_samples(model: nn.Module) -> None:
    """Numbers of targets and of samples are in no proportion."""
    change_loss(model, lambda loss, logits: loss + logits.mean((1, 2)).mean())


REFUSED_BY_THE_LAST_STAGE = {
    turn_off_a_dropout: "UnkeyedRandomness: a pipeline stage drew other random numbers",
    square_the_loss: "LossNotAdditive: ",
    detach_the_loss: "LossNotAdditive: the loss needs no gradient",
    divide_by_a_constant: "LossNotAdditive: ",
    add_a_mean_over_samples: "ConfigError: the loss is a sum of means whose divisors keep no",
}


def test_what_the_last_stage_refuses_ends_all_ranks_before_the_update():
    """All ranks name it: none is cut off by the end of another, and they can go on together."""

    def work() -> list[tuple[str, bool]]:
        found = []
        for change in REFUSED_BY_THE_LAST_STAGE:
            pipeline, windows = make_pipeline("GPT-2", 2, "1f1b")
            if pipeline.stage == 1:
                change(pipeline.model)
            found.append(step_outcome(pipeline, next(iter(windows))))
        return found

    for found in without_errors(on_ranks(work, 2)):
        assert_refused(found, REFUSED_BY_THE_LAST_STAGE)


def assert_refused(found: list[tuple[str, bool]], words_of: dict[Callable, str]) -> None:
    """Each with its words, and the weights as they were."""
    for (said, is_unchanged), words in zip(found, words_of.values(), strict=True):
        assert words in said
        assert is_unchanged, said


def drop_input_ids(pipeline: hf_ga.Pipeline, window: hf_ga.Window) -> None:
    window.batches[-1].pop("input_ids")


def change_a_label(pipeline: hf_ga.Pipeline, window: hf_ga.Window) -> None:
    """As a dataset or a collate function that draws differently on each process."""
    window.batches[-1]["labels"][0, 1] = 3 - window.batches[-1]["labels"][0, 1].clamp(0, 2)


def widen_a_batch(pipeline: hf_ga.Pipeline, window: hf_ga.Window) -> None:
    for name, value in window.batches[-1].items():
        window.batches[-1][name] = nn.functional.pad(value, (0, 1), value=int(name == "labels"))


def evaluate(pipeline: hf_ga.Pipeline, window: hf_ga.Window) -> None:
    pipeline.model.eval()


OTHERWISE_ON_ONE_RANK = {
    drop_input_ids: "KeyError: 'input_ids'",
    change_a_label: "ConfigError: the stages of a pipeline have different batches",
    widen_a_batch: "ConfigError: the stages of a pipeline have different batches",
    evaluate: "ConfigError: the model is in evaluation mode",
}


def test_what_one_rank_has_otherwise_ends_all_before_the_schedule():
    def work() -> list[tuple[str, bool]]:
        found = []
        for change in OTHERWISE_ON_ONE_RANK:
            pipeline, windows = make_pipeline("GPT-2", 2, "1f1b")
            window = next(iter(windows))
            if pipeline.stage == 1:
                change(pipeline, window)
            found.append(step_outcome(pipeline, window))
        return found

    for found in without_errors(on_ranks(work, 2)):
        assert_refused(found, OTHERWISE_ON_ONE_RANK)


@pytest.mark.parametrize(("stage", "has_generator"), [(0, False), (1, True)])
def test_random_numbers_in_a_backward_are_refused(stage, has_generator):
    """The numbers of a generator of the user's own move no generator of torch."""

    def add_noise(gradient: Tensor) -> Tensor:
        generator = torch.Generator() if has_generator else None
        return gradient + torch.randn(gradient.shape, generator=generator)

    def work() -> tuple[str, bool]:
        pipeline, windows = make_pipeline("GPT-2", 2, "1f1b")
        if pipeline.stage == stage:
            next(pipeline.model.transformer.h[2 * stage].parameters()).register_hook(add_noise)
        return step_outcome(pipeline, next(iter(windows)))

    for said, is_unchanged in without_errors(on_ranks(work, 2)):
        assert "UnkeyedRandomness: a pipeline stage drew other random numbers" in said
        assert is_unchanged


def test_a_loss_that_compares_samples_is_refused_before_the_split():
    """On all ranks, also where only one of them has such a model."""

    def work() -> str:
        accelerator = make_accelerator("ddp")
        model = h.gpt2(num_hidden_layers=3)
        if accelerator.process_index == 1:
            model.transformer.ln_f.register_forward_hook(lambda *args: args[2] - args[2].mean(0))
        windows = windows_of(accelerator, h.token_samples(WINDOW))
        return outcome(partial(hf_ga.prepare_pipeline, accelerator, model, windows, num_stages=2))

    for said in on_ranks(work, 2):
        assert "LossNotAdditive: " in said


def test_draws_that_samples_share_are_those_of_the_trial():
    """Micro-batches of one size do not show it. Control: a stage that does not know the trial."""
    name = "noisy GPT-2"
    samples = h.token_samples(WINDOW)

    def work() -> tuple[h.Gradients, h.Gradients]:
        pipeline, windows = make_pipeline(name, 2, "1f1b", samples)
        (window,) = windows
        window = window.split(np.split(np.arange(WINDOW), 4))
        pipeline.backward_window(window)
        ours = h.gradients(pipeline.model)
        pipeline.model.zero_grad()
        pipeline._loop.engine.draws.adopt(KeyedDraws().known())
        pipeline.backward_window(window)
        return ours, h.gradients(pipeline.model)

    ours, naive = zip(*without_errors(on_ranks(work, 2)), strict=True)
    truth = full_gradient(name, samples, WINDOW)
    assert h.relative_error(put_together(ours), truth) < FLOOR
    assert h.relative_error(put_together(naive), truth) > 0.01


@pytest.mark.slow("trains on several processes")
def test_killed_and_resumed_on_one_process(tmp_path):
    """Control: without the optimizer's state the weights differ."""
    kill_two_stages(tmp_path)
    expected, _ = alone("GPT-2")
    assert h.relative_error(one_process_with(tmp_path), expected) < FLOOR
    assert h.relative_error(one_process_with(tmp_path, with_moments=False), expected) > 100 * FLOOR


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


@pytest.mark.parametrize("num_stages", [2, 5])
@pytest.mark.parametrize("name", SUPPORTED_MODELS)
def test_stages_one_after_the_other_are_the_whole_model(name, num_stages):
    """The same bits of the loss, the same gradients, and each parameter on one stage or tied."""
    whole = whole_model(name, 5)
    batch = h.pad_right(h.class_samples(4) if "Sequence" in name else h.tag_samples(4))
    if name.startswith(("Bert", "GPT2")):
        batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    stages = [StageModel(copy.deepcopy(whole), i, num_stages) for i in range(num_stages)]
    entries = batch
    for stage in stages[:-1]:
        entries = {**batch, "inputs_embeds": stage(**entries)}
    loss = stages[-1](**entries).loss
    expected = whole(**batch).loss
    assert torch.equal(loss, expected)

    loss.backward()
    expected.backward()
    first = stages[0]
    last = stages[-1]
    if first.tied is not None:
        assert first.tied is not last.tied
        first.tied.grad += last.tied.grad
        last.tied.grad = first.tied.grad
    gradients = put_together([h.gradients(stage.model) for stage in stages])
    assert h.relative_error(gradients, h.gradients(whole)) < FLOOR


def refused(model: nn.Module, samples: list[dict], num_stages: int = 2, **options: Any) -> str:
    """What `prepare_pipeline` says on one process."""
    accelerator = make_accelerator("ddp")
    windows = windows_of(accelerator, samples)
    with pytest.raises(ConfigError) as error:
        hf_ga.prepare_pipeline(accelerator, model, windows, num_stages=num_stages, **options)
    return str(error.value)


def scaled_logits() -> nn.Module:
    """A first stage would scale its hidden states."""
    model = h.gpt2()

    def scale(model: nn.Module, args: tuple, outputs: Any) -> Any:
        outputs.logits = outputs.logits * 2
        return outputs

    model.register_forward_hook(scale)
    return model


def scaled_states() -> nn.Module:
    """Each stage would scale its own."""
    model = h.gpt2()
    model.transformer.register_forward_pre_hook(lambda *args: None)
    return model


def wrapped_forward() -> nn.Module:
    model = h.gpt2()
    model.forward = partial(model.forward, output_attentions=False)
    return model


def checkpointed_gpt2() -> nn.Module:
    model = h.gpt2()
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (h.mixtral, {}, "unsupported model for a pipeline: MixtralForCausalLM"),
        (h.gpt2, {"num_stages": 3}, "got 3 stages for 2 layers"),
        (h.gpt2, {"num_stages": 1}, "between 2 and the number of layers"),
        (h.gpt2, {"schedule": "zigzag"}, "schedule must be one of gpipe, 1f1b, got 'zigzag'"),
        (h.gpt2, {}, "2 pipeline stages need a multiple of 2 processes, got 1"),
        (checkpointed_gpt2, {}, "gradient checkpointing in a pipeline"),
        (scaled_logits, {}, "a hook or another forward of GPT2LMHeadModel"),
        (scaled_states, {}, "a hook or another forward of GPT2Model"),
        (wrapped_forward, {}, "a hook or another forward of GPT2LMHeadModel"),
    ],
)
def test_unsupported_settings_are_refused_by_name(model, options, words):
    assert words in refused(model(), h.token_samples(8), **options)


def test_windows_of_another_loader_are_refused():
    """It gives each stage samples of its own."""

    def work() -> str:
        pipeline, _ = make_pipeline("GPT-2", 2, "gpipe")
        others = windows_of(make_accelerator("ddp"), h.token_samples(WINDOW))
        dist.barrier()  # a rank that is refused at once would end while the other one connects
        return outcome(partial(pipeline.backward_window, next(iter(others))))

    for said in on_ranks(work, 2):
        assert "ConfigError: this window is not from the WindowLoader" in said


def test_fp16_and_fsdp_are_refused(monkeypatch):
    accelerator = make_accelerator("ddp")
    windows = windows_of(accelerator, h.token_samples(8))
    model = h.gpt2()
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match="unsupported: fp16 in a pipeline"):
        hf_ga.prepare_pipeline(accelerator, model, windows, num_stages=2)
    accelerator.scaler = None
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ConfigError, match="unsupported: FSDP in a pipeline"):
        hf_ga.prepare_pipeline(accelerator, model, windows, num_stages=2)


def test_weights_that_differ_between_ranks_are_refused():
    def work() -> str:
        accelerator = make_accelerator("ddp")
        model = h.gpt2()
        with torch.no_grad():
            model.lm_head.weight += accelerator.process_index
        windows = windows_of(accelerator, h.token_samples(8))
        make = partial(hf_ga.prepare_pipeline, accelerator, model, windows, num_stages=2)
        return outcome(make)

    for said in on_ranks(work, 2):
        assert "must have the same weights" in said


def test_replicas_count_once_in_the_size_of_a_saved_model():
    stages = [("first.safetensors", {"embed": 8}), ("last.safetensors", {"head": 4, "norm": 2})]
    index = weights_index(stages)
    assert index["metadata"]["total_size"] == 14
    assert weights_index(stages * 2) == index
