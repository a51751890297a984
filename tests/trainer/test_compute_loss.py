"""Losses that users write into `compute_loss`, or pass as `compute_loss_func`: every split of a
window makes the update of the full batch, and Trainer's splits do not.
"""

import copy

import helpers as h
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from datasets import Dataset
from trainers import arguments, make_trainer, mixed, weight_error, word_tokenizer
from trl import KTOConfig, KTOTrainer, SFTTrainer

from hf_ga import ConfigError, ExactTrainerMixin, LossNotAdditive

WINDOW = 8
NUM_SAMPLES = 20  # two full windows and a short one
LAYOUTS = [(8, 1), (2, 4)]  # per-device batch, accumulation steps: one window
CLOSE = 1e-5
IN_ORDER = {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
FIRST = {**IN_ORDER, "max_steps": 1}  # the first window only
TEACHER = h.bert_classifier(0.0).eval()
for _parameter in TEACHER.parameters():
    _parameter.data = 2 * _parameter.data + 0.1


class OwnLoss(tf.Trainer):
    """A loss of outputs and labels: `loss_of(model, inputs, labels)`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs, loss = self.loss_of(model, inputs, labels)
        return (loss, outputs) if return_outputs else loss


class ClassWeights(OwnLoss):
    """The rare class counts 90 times as much: a mean over weights."""

    def loss_of(self, model, inputs, labels):
        outputs = model(**inputs)
        weight = torch.tensor([0.1, 1.0, 9.0]).to(outputs.logits.dtype)
        return outputs, F.cross_entropy(outputs.logits, labels, weight=weight)


class Focal(OwnLoss):
    """Easy samples count less."""

    def loss_of(self, model, inputs, labels):
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits, labels, reduction="none")
        easiness = torch.exp(-losses)
        return outputs, ((1 - easiness) ** 2 * losses).mean()


class Distillation(OwnLoss):
    """Half of the loss is the distance to a frozen teacher."""

    def loss_of(self, model, inputs, labels):
        outputs = model(**inputs, labels=labels)
        with torch.no_grad():
            teacher = TEACHER(**inputs).logits.to(outputs.logits.dtype)
        student = F.log_softmax(outputs.logits / 2, -1)
        distance = F.kl_div(student, F.softmax(teacher / 2, -1), reduction="batchmean")
        return outputs, 0.5 * outputs.loss + 2.0 * distance


class TwoDropouts(OwnLoss):
    """R-Drop: two forwards with different masks should agree."""

    def loss_of(self, model, inputs, labels):
        one = model(**inputs, labels=labels)
        two = model(**inputs, labels=labels)
        distance = F.kl_div(
            F.log_softmax(one.logits, -1), F.softmax(two.logits, -1), reduction="batchmean"
        )
        return one, (one.loss + two.loss) / 2 + distance


class NoisyEmbeddings(OwnLoss):
    """One random number a sample and position is added to the embeddings."""

    def loss_of(self, model, inputs, labels):
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        embeddings = embeddings + torch.rand_like(embeddings[:, :1])
        mask = inputs["attention_mask"]
        outputs = model(inputs_embeds=embeddings, attention_mask=mask, labels=labels)
        return outputs, outputs.loss


class DividedByItems(tf.Trainer):
    """A sum, divided by what Trainer says."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        number = len(labels) if num_items_in_batch is None else num_items_in_batch
        loss = F.cross_entropy(outputs.logits, labels, reduction="sum") / number
        return (loss, outputs) if return_outputs else loss


class WeightPenalty(tf.Trainer):
    """L2 on the classifier, in the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss + 0.05 * sum(p.square().sum() for p in model.classifier.parameters())
        return (loss, outputs) if return_outputs else loss


def sum_over_items(outputs, labels, num_items_in_batch=None):
    number = num_items_in_batch or len(labels)
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / number


FUNCTION = {"trainer": {"compute_loss_func": sum_over_items}}
# Name -> (trainer, further arguments).
FORMS = {
    "the model's own": (tf.Trainer, {}),
    "label smoothing": (tf.Trainer, {"label_smoothing_factor": 0.1}),
    "class weights": (ClassWeights, {}),
    "focal": (Focal, {}),
    "distillation": (Distillation, {}),
    "two dropouts": (TwoDropouts, {}),
    "noisy embeddings": (NoisyEmbeddings, {}),
    "divided by items": (DividedByItems, {}),
    "weight penalty": (WeightPenalty, {}),
    "compute_loss_func": (tf.Trainer, FUNCTION),
}
DRAWING = ("two dropouts", "noisy embeddings")
# Where Trainer divides by the items of the window, and there is no dropout, it is right.
RIGHT_IN_TRAINER = ("label smoothing", "divided by items", "compute_loss_func")


@pytest.mark.parametrize("name", [*DRAWING, "distillation", "class weights", "divided by items"])
def test_every_split_makes_the_same_updates(case, name):
    """With dropout; the control is Trainer, also where it is wrong only because of the masks."""
    base, more = FORMS[name]
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    full, split = (given.run(mixed(base), layout, **IN_ORDER, **more) for layout in LAYOUTS)
    assert len(full.weights) == 3
    assert h.relative_error(split.gradients[0], full.gradients[0]) < CLOSE
    assert weight_error(split, full) < CLOSE
    assert split.losses == pytest.approx(full.losses, rel=CLOSE)
    plain_full, plain = (given.run(base, layout, **FIRST, **more) for layout in LAYOUTS)
    assert h.relative_error(plain.gradients[0], plain_full.gradients[0]) > 0.05


@pytest.mark.parametrize("name", [name for name in FORMS if name not in DRAWING])
def test_the_gradient_is_that_of_the_full_batch(case, name):
    """One forward and backward of the same `compute_loss` in float64, without dropout."""
    base, more = FORMS[name]
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES), dropout=0.0)
    trainer = given.make(base, (8, 1), **IN_ORDER, **more)
    model = copy.deepcopy(given.model).double()
    batch = h.pad_right(given.samples[:WINDOW])
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    run = given.run(mixed(base), (2, 4), **FIRST, **more)
    assert h.relative_error(run.gradients[0], h.gradients(model)) < CLOSE
    assert run.losses[0] == pytest.approx(float(loss.detach()), rel=CLOSE)
    plain = given.run(base, (2, 4), **FIRST, **more)
    is_right = h.relative_error(plain.gradients[0], h.gradients(model)) < 0.05
    assert is_right is (name in RIGHT_IN_TRAINER), "control"


class HardestSample(OwnLoss):
    """Only the largest loss of a batch counts."""

    def loss_of(self, model, inputs, labels):
        outputs = model(**inputs)
        return outputs, F.cross_entropy(outputs.logits, labels, reduction="none").max()


class LikesLargeBatches(OwnLoss):
    """In-batch negatives: a sample's loss depends on the others."""

    def loss_of(self, model, inputs, labels):
        outputs = model(**inputs)
        scores = outputs.logits @ outputs.logits.T
        return outputs, F.cross_entropy(scores, torch.arange(len(scores)))


class BaselineOfLast(OwnLoss):
    """A baseline from the last micro-batch of the window before."""

    def loss_of(self, model, inputs, labels):
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits, labels, reduction="none")
        if vars(self).get("step") != self.state.global_step:
            self.step = self.state.global_step
            self.baseline = vars(self).get("last", torch.zeros(()))
        self.last = losses.detach().mean()
        return outputs, ((losses.detach() - self.baseline) * losses).mean()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (HardestSample, r"a maximum over the batch \(MaxBackward"),
        (LikesLargeBatches, r"cross entropy.* depends on the other samples of its micro-batch"),
        (BaselineOfLast, "keeps of the samples of an earlier window"),
    ],
)
def test_losses_that_compare_samples_are_refused(case, base, message):
    """The error names the term; a single micro-batch is the full batch, and trains."""
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    with pytest.raises(LossNotAdditive, match=message):
        given.run(mixed(base), (2, 4), **IN_ORDER)


def test_noise_in_embeddings_of_trainers_own(case):
    """NEFTune: its noise is scaled by the padded width, so windows are padded to one."""
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    noise = {"neftune_noise_alpha": 5.0}
    full, split = (given.run(layout=layout, **noise, **IN_ORDER) for layout in LAYOUTS)
    assert h.relative_error(split.gradients[0], full.gradients[0]) < CLOSE
    assert weight_error(split, full) < CLOSE
    without = given.run(layout=(8, 1), **FIRST)
    assert h.relative_error(without.gradients[0], full.gradients[0]) > 0.05, "control"
    plain_full, plain = (given.run(tf.Trainer, layout, **noise, **FIRST) for layout in LAYOUTS)
    assert h.relative_error(plain.gradients[0], plain_full.gradients[0]) > 0.05


def test_a_mixin_behind_its_trainer_is_refused():
    with pytest.raises(ConfigError, match=r"class Behind\(ExactTrainerMixin, SFTTrainer\)"):
        type("Behind", (SFTTrainer, ExactTrainerMixin), {})
    assert issubclass(mixed(SFTTrainer), ExactTrainerMixin)


def test_kto_is_refused_by_name(tmp_path):
    """It has a sampler of its own."""
    rows = [
        {"prompt": "w1 w2", "completion": f" w{number}", "label": number % 2 == 0}
        for number in range(16)
    ]
    trainer = make_trainer(
        mixed(KTOTrainer),
        h.gpt2(0.0),
        arguments(tmp_path, (2, 4), KTOConfig, bf16=False),
        Dataset.from_list(rows),
        ref_model=h.gpt2(0.0).eval(),
        processing_class=word_tokenizer(),
    )
    with pytest.raises(ConfigError, match=r"KTOTrainer\._get_train_sampler overrides the order"):
        trainer.train()


def test_the_layout_is_logged_without_a_progress_bar(case, caplog):
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    given.run(layout=(2, 4), disable_tqdm=True, max_steps=1)
    assert "window of 8 samples = 1 process x 4 micro-batches x 2" in caplog.text


class Scaled(tf.Trainer):
    """Has a parameter of its own, beside the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = self.scale * model(**inputs).logits
        return F.cross_entropy(logits, inputs["labels"])


def test_a_window_without_targets_leaves_parameters_beside_the_model_alone(case):
    samples = [{**sample, "labels": -100} for sample in h.class_samples(16)]
    trainer = case(h.bert_classifier, samples).make(mixed(Scaled), num_train_epochs=1)
    trainer.scale = torch.nn.Parameter(torch.ones(()))
    parameters = [*trainer.model.parameters(), trainer.scale]
    trainer.optimizer = torch.optim.SGD(parameters, 0.1, weight_decay=0.1)
    before = [parameter.detach().clone() for parameter in parameters]
    trainer.train()
    assert all(map(torch.equal, parameters, before))
