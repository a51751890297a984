"""ExactTrainer: every split of a window makes the same update, Trainer's does not; everything else
stays Trainer's own.
"""

import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from trainers import LAYOUTS, distance, mixed, weight_error, word_tokenizer

from hf_ga.engine.window_engine import WindowEngine
from hf_ga.order.order import epoch_order
from hf_ga.trainer.exact_trainer import ExactTrainer

NUM_SAMPLES, WINDOW = 24, 16  # a full window and a short one in each of two epochs
CLOSE = 1e-5
STILL = {
    "learning_rate": 0.0,
    "train_sampling_strategy": "sequential",
    "num_train_epochs": 1,
}  # to look at gradients only


def answer_samples(number):
    """Question answering: a third of the answers end beyond the text, which the second of its two
    means leaves out.
    """
    texts = [{k: s[k] for k in ("input_ids", "attention_mask")} for s in h.token_samples(number)]
    return [
        {**s, "start_positions": 1, "end_positions": 99 if i % 3 == 0 else i % 4}
        for i, s in enumerate(texts)
    ]


MODELS = {
    "bert": (h.bert_classifier, h.class_samples),
    "gpt2": (h.gpt2, h.token_samples),  # Trainer divides by the unshifted labels
    "t5": (h.t5, h.token_samples),
    "xlnet": (
        h.xlnet_classifier,
        h.class_samples,
    ),  # its summary is the last column: one width a window
    "answers": (h.bert_question_answering, answer_samples),  # a sum of means
}


def test_all_layouts_make_the_same_updates_and_trainers_do_not(case):
    """With dropout, over an epoch's end, with a short last window. Trainer: 4 times the
    gradient.
    """
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    full, *split = [given.run(layout=layout) for layout in LAYOUTS]
    assert len(full.gradients) == 4
    for run in split:
        assert h.relative_error(run.gradients[0], full.gradients[0]) < CLOSE
        assert weight_error(run, full) < CLOSE
        assert run.losses == pytest.approx(full.losses, rel=CLOSE)
    plain_full, plain = (given.run(tf.Trainer, layout) for layout in LAYOUTS[:2])
    assert h.relative_error(plain.gradients[0], plain_full.gradients[0]) > 0.1
    assert weight_error(plain, plain_full) > 100 * max(weight_error(run, full) for run in split)
    assert h.norm(plain.gradients[0]) / h.norm(plain_full.gradients[0]) == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("name", MODELS)
def test_each_windows_gradient_and_loss_are_those_of_the_full_batch(case, name):
    """Plain PyTorch in float64: one forward and backward of the mean loss over the window's
    samples, the short last window too.
    """
    build, make_samples = MODELS[name]
    given = case(build, make_samples(NUM_SAMPLES), dropout=0.0)
    run, plain = (
        given.run(trainer_class, (4, 4), **STILL) for trainer_class in (ExactTrainer, tf.Trainer)
    )
    for step, window in enumerate([given.samples[:WINDOW], given.samples[WINDOW:]]):
        batch = h.pad_right(window)
        reference = h.full_batch_gradient(given.model, batch)
        assert h.relative_error(run.gradients[step], reference) < CLOSE
        assert run.losses[step] == pytest.approx(
            float(h.mean_loss(given.model, batch).detach()), rel=CLOSE
        )
        assert run.logs[step]["grad_norm"] == pytest.approx(h.norm(reference), rel=CLOSE)
        assert h.relative_error(plain.gradients[step], reference) > 0.01


def test_a_buffer_counts_each_sample_once(case, monkeypatch):
    """Not again in a rehearsal, nor in the first window, which is computed again with one width."""
    model = h.xlnet_classifier()
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def count(module, args, kwargs):
        module.seen += len(kwargs["input_ids"])

    model.register_forward_pre_hook(count, with_kwargs=True)
    given = case(lambda dropout: model, h.class_samples(NUM_SAMPLES))
    assert int(given.run(num_train_epochs=1).trainer.model.seen) == NUM_SAMPLES
    monkeypatch.setattr(WindowEngine, "restore_buffers", lambda self: None)  # the control
    assert int(given.run(num_train_epochs=1).trainer.model.seen) > NUM_SAMPLES


def test_each_epoch_has_an_order_of_its_own(case):
    """The gradient of each epoch's first window is that of the samples that hf_ga's order names."""
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES), dropout=0.0)
    run = given.run(learning_rate=0.0)
    for epoch in (0, 1):
        window = epoch_order(NUM_SAMPLES, 3, epoch)[:WINDOW]
        reference = h.full_batch_gradient(
            given.model, h.pad_right([given.samples[i] for i in window])
        )
        assert h.relative_error(run.gradients[2 * epoch], reference) < CLOSE
        assert (
            h.relative_error(run.gradients[2 - 2 * epoch], reference) > 0.01
        )  # not the other epoch's


def test_micro_batches_and_windows_without_targets(case):
    """One by one, half of the samples have no target; then a whole window has none: nothing is
    learned from it, no NaN.
    """
    window = 8
    samples = [
        h.without_targets(s) if i % 2 or i >= window else s
        for i, s in enumerate(h.tag_samples(2 * window))
    ]
    given = case(h.bert_token_classifier, samples)
    full, split = (
        given.run(layout=layout, train_sampling_strategy="sequential", max_steps=3)
        for layout in ((window, 1), (1, window))
    )
    assert weight_error(split, full) < CLOSE
    assert distance(split.weights[1], split.weights[0]) == 0
    assert distance(split.weights[2], split.weights[1]) > 1e-4
    assert np.isfinite(split.losses).all()


def random_masks() -> tf.DataCollatorForLanguageModeling:
    """Transformers' own collator, which draws from torch's generator."""
    return tf.DataCollatorForLanguageModeling(word_tokenizer(), mlm_probability=0.3)


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_collators_that_draw_draw_the_same_for_every_layout_and_in_workers(case):
    samples = [
        {"input_ids": s["input_ids"], "attention_mask": s["attention_mask"]}
        for s in h.token_samples(NUM_SAMPLES)
    ]
    given = case(h.bert_masked_lm, samples)
    drawing = {"trainer": {"data_collator": random_masks()}, "lr_scheduler_type": "constant"}
    full = given.run(layout=(16, 1), **drawing)
    split = given.run(**drawing)
    in_workers = given.run(**drawing, dataloader_num_workers=2, num_train_epochs=1)
    assert weight_error(split, full) < CLOSE
    assert distance(in_workers.weights[1], split.weights[1]) == 0
    plain_full = given.run(tf.Trainer, (16, 1), **drawing)
    plain = given.run(tf.Trainer, **drawing)
    assert weight_error(plain, plain_full) > 0.01


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(case):
    """Stopped at the end of the first epoch and in the middle of the second; and resumed on another
    layout.
    """
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    whole = given.run(save_strategy="steps", save_steps=1)
    for stopped_after, workers in ((2, 0), (3, 2)):
        resumed = given.run(dataloader_num_workers=workers, resume=stopped_after)
        assert len(resumed.weights) == 4 - stopped_after
        assert distance(resumed.weights[-1], whole.weights[-1]) == 0
    assert 0 < weight_error(given.run(layout=(16, 1), resume=3), whole) < CLOSE
    assert weight_error(given.run(seed=4, resume=3), whole) > 1e-4  # another order, other masks


def test_max_steps_stops_the_same_run_earlier_and_short_windows_can_be_dropped(case):
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    constant = {"lr_scheduler_type": "constant"}
    whole = given.run(**constant)
    assert distance(given.run(max_steps=3, **constant).weights[-1], whole.weights[2]) == 0
    full_windows = given.run(dataloader_drop_last=True, **constant)
    assert len(full_windows.weights) == 2


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_clipping_and_learning_rates_do_not_depend_on_the_layout(case):
    given = case(h.gpt2, h.token_samples(NUM_SAMPLES))
    settings = {"max_grad_norm": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    full = given.run(layout=(16, 1), **settings)
    split = given.run(layout=(1, 16), **settings)
    assert weight_error(split, full) < CLOSE
    assert [log["learning_rate"] for log in split.logs] == [
        log["learning_rate"] for log in full.logs
    ]
    assert [log["grad_norm"] for log in split.logs] == pytest.approx(
        [log["grad_norm"] for log in full.logs], rel=CLOSE
    )
    assert h.norm(split.gradients[0]) == pytest.approx(0.05, rel=1e-3)


def test_data_seed_gives_the_order_and_seed_the_masks(case):
    """The gradients of the first window; without dropout, and with it. Both seeds are 3 where none
    is given.
    """
    for dropout, seeds in (
        (0.0, [{}, {"seed": 5, "data_seed": 3}, {"data_seed": 4}]),
        (0.1, [{}, {"seed": 5, "data_seed": 3}]),
    ):
        given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES), dropout=dropout)
        reference, other_seed, *other_order = (
            given.run(max_steps=1, **more).gradients[0] for more in seeds
        )
        assert (h.relative_error(other_seed, reference) < CLOSE) is (dropout == 0)
        assert all(h.relative_error(other, reference) > 0.01 for other in other_order)


# --- losses of one's own ---


def mean_over_items(outputs, labels, num_items_in_batch=None):
    """The documented form: Trainer says by what to divide."""
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / (num_items_in_batch or (labels != h.IGNORED).sum())


def needs_items(outputs, labels, num_items_in_batch):
    return (
        F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        / num_items_in_batch
    )


def sum_without_items(outputs, labels, num_items_in_batch=None):
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def plain_mean(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("function", [mean_over_items, needs_items, sum_without_items, plain_mean])
def test_compute_loss_func(case, function):
    given = case(h.bert_token_classifier, h.tag_samples(NUM_SAMPLES), dropout=0.0)
    reference = h.full_batch_gradient(given.model, h.pad_right(given.samples[:WINDOW]))
    own = {"trainer": {"compute_loss_func": function}, **STILL}
    assert h.relative_error(given.run(**own).gradients[0], reference) < CLOSE
    if function is plain_mean:
        assert (
            h.relative_error(given.run(tf.Trainer, **own).gradients[0], reference) > 2
        )  # Trainer adds four means


@pytest.mark.parametrize(("build", "shift"), [(h.gpt2, True), (h.bert_token_classifier, False)])
def test_label_smoothing(case, build, shift):
    """The formula of label smoothing over all labelled tokens of the window, in float64."""
    given = case(
        build, h.token_samples(NUM_SAMPLES) if shift else h.tag_samples(NUM_SAMPLES), dropout=0.0
    )
    batch = h.pad_right(given.samples[:WINDOW])

    def smoothed(outputs, batch):
        logits, labels = (
            (outputs.logits[:, :-1], batch["labels"][:, 1:])
            if shift
            else (outputs.logits, batch["labels"])
        )
        losses = -F.log_softmax(logits[labels != h.IGNORED], -1)
        losses = 0.9 * losses.gather(1, labels[labels != h.IGNORED][:, None])[
            :, 0
        ] + 0.1 * losses.mean(1)
        return losses.sum(), len(losses)

    reference = h.full_batch_gradient(given.model, batch, loss_fn=smoothed)
    run, plain = (
        given.run(c, label_smoothing_factor=0.1, **STILL) for c in (ExactTrainer, tf.Trainer)
    )
    assert h.relative_error(run.gradients[0], reference) < CLOSE
    assert (
        h.relative_error(plain.gradients[0], reference) > 0.01
    ) is shift  # for GPT-2 it divides by the unshifted labels
    assert (
        h.relative_error(run.gradients[0], h.full_batch_gradient(given.model, batch)) > 0.01
    )  # not without smoothing


class LossOfMyOwn(tf.Trainer):
    """Square of the hinge of the right class: a mean over labelled tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        right = outputs.logits[labels != h.IGNORED].gather(1, labels[labels != h.IGNORED][:, None])
        loss = (1 - right).square().mean()
        return (loss, outputs) if return_outputs else loss


class Derived(ExactTrainer):
    """Only the import line was changed."""

    compute_loss = LossOfMyOwn.compute_loss


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_subclasses_with_a_loss_of_their_own(case):
    def squares(outputs, batch):
        chosen = batch["labels"] != h.IGNORED
        right = outputs.logits[chosen].gather(1, batch["labels"][chosen][:, None])
        return (1 - right).square().sum(), int(chosen.sum())

    given = case(h.bert_token_classifier, h.tag_samples(NUM_SAMPLES), dropout=0.0)
    reference = h.full_batch_gradient(
        given.model, h.pad_right(given.samples[:WINDOW]), loss_fn=squares
    )
    for trainer_class in (mixed(LossOfMyOwn), Derived):
        assert h.relative_error(given.run(trainer_class, **STILL).gradients[0], reference) < CLOSE
    assert h.relative_error(given.run(LossOfMyOwn, **STILL).gradients[0], reference) > 2
    given = case(h.bert_token_classifier, given.samples)
    assert (
        weight_error(*(given.run(mixed(LossOfMyOwn), layout) for layout in ((1, 16), (16, 1))))
        < CLOSE
    )


class DividesByItself(tf.Trainer):
    """What users write against Trainer's missing division."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def test_a_division_by_the_accumulation_steps_in_the_loss_does_no_harm(case):
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES), dropout=0.0)
    reference = h.full_batch_gradient(given.model, h.pad_right(given.samples[:WINDOW]))
    run = given.run(mixed(DividesByItself), **STILL)
    assert h.relative_error(run.gradients[0], reference) < CLOSE
    assert run.trainer.args.gradient_accumulation_steps == 4
