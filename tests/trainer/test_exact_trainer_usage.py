"""ExactTrainer in Trainer's documented usage, and what it refuses."""

import copy
import pickle

import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset
from images import collate_images, image_samples, images_and_text
from memory_limits import Device
from peft import LoraConfig, get_peft_model
from test_exact_trainer import CLOSE, NUM_SAMPLES, STILL, WINDOW, LossOfMyOwn
from torch.utils.data import IterableDataset
from trainers import distance, mixed, weight_error, word_tokenizer

from hf_ga import ConfigError, DataError, UnkeyedRandomness
from hf_ga.parallel.prepare import enable_fp16_on_cpu
from hf_ga.trainer.checks import last_complete_checkpoint
from hf_ga.trainer.exact_trainer import ExactTrainer


def accuracy(prediction: tf.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_evaluation_prediction_callbacks_and_logs_are_trainers_own(case):
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    usual = {"eval_dataset": given.samples[:10], "compute_metrics": accuracy}
    scheduled = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "include_num_input_tokens_seen": "non_padding",
        **STILL,
    }
    exact, plain = (
        given.run(c, trainer=usual, **scheduled).trainer for c in (ExactTrainer, tf.Trainer)
    )
    assert (
        exact.run.events
        == plain.run.events
        == ["begin", *["substep"] * 3, "step", "begin", "substep", "step"]
    )
    assert [log.keys() for log in exact.state.log_history] == [
        log.keys() for log in plain.state.log_history
    ]
    assert exact.state.num_input_tokens_seen == plain.state.num_input_tokens_seen > 0
    timeless = [
        {k: v for k, v in t.evaluate().items() if "runtime" not in k and "second" not in k}
        for t in (exact, plain)
    ]
    assert timeless[0] == timeless[1]
    assert "eval_accuracy" in timeless[0]
    predictions = [t.predict(given.samples).predictions for t in (exact, plain)]
    assert (predictions[0] == predictions[1]).all()


def test_the_best_checkpoint_is_loaded_and_the_saved_model_is_the_trained_one(case):
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    }
    trainer = given.run(trainer={"eval_dataset": given.samples}, **best, save_total_limit=1).trainer
    trainer.save_model(str(given.folder / "saved"))
    loaded = tf.BertForSequenceClassification.from_pretrained(given.folder / "saved")
    assert distance(dict(loaded.named_parameters()), dict(trainer.model.named_parameters())) == 0
    assert trainer.state.best_metric == pytest.approx(trainer.evaluate()["eval_loss"])


def test_datasets_with_other_columns_tokenizers_and_default_collators(case):
    rows = [
        {"input_ids": s["input_ids"][:4], "attention_mask": [1] * 4, "label": s["labels"]}
        for s in h.class_samples(NUM_SAMPLES)
    ]
    given = case(
        h.bert_classifier, Dataset.from_list([{**row, "text": "not for the model"} for row in rows])
    )
    by_dataset = given.run(trainer={"data_collator": None})
    given.samples = rows
    by_list = given.run(trainer={"data_collator": None})
    with_tokenizer = given.run(
        layout=(16, 1), trainer={"data_collator": None, "processing_class": word_tokenizer()}
    )
    assert distance(by_dataset.weights[-1], by_list.weights[-1]) == 0
    assert weight_error(with_tokenizer, by_dataset) < CLOSE


def positions(batch, index):
    """Of the samples of a window's micro-batch, in the order of the epoch."""
    return batch.request.positions[batch.request.micro_batches[index]]


def test_the_train_data_loader_yields_plain_batches_of_similar_lengths(case):
    """As many as Trainer's, each window sorted by length."""
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    trainer = given.make(train_sampling_strategy="sequential")
    loader = trainer.get_train_dataloader()
    batches = list(loader)
    assert len(loader) == len(batches) == 6
    assert all(isinstance(batch, dict) for batch in batches)
    windows = (batches[:4], batches[4:])
    ids = [  # in sequence, so positions are sample ids
        [positions(batch, index).tolist() for index, batch in enumerate(window)]
        for window in windows
    ]
    for window, ids_of_window in zip(windows, ids, strict=True):
        for batch, of_batch in zip(window, ids_of_window, strict=True):
            assert batch["labels"].tolist() == [given.samples[i]["labels"] for i in of_batch]
    lengths = [
        [len(given.samples[i]["input_ids"]) for of_batch in window for i in of_batch]
        for window in ids
    ]
    assert (
        [sorted(window) for window in lengths]
        == lengths
        != [[len(s["input_ids"]) for s in given.samples[:16]]]
    )
    assert sorted(i for of_batch in ids[0] for i in of_batch) == list(range(WINDOW))
    assert trainer.model(**batches[0]).loss.item() > 0


class DependsOnEpoch(list):
    """A dataset that is told its epoch, as a curriculum would be."""

    epochs = ()

    def set_epoch(self, epoch: int) -> None:
        self.epochs = (*self.epochs, epoch)


def test_datasets_are_told_their_epoch_and_batches_keep_their_window_when_copied(case):
    given = case(h.bert_classifier, DependsOnEpoch(h.class_samples(NUM_SAMPLES)))
    trainer = given.run(save_strategy="steps", save_steps=3).trainer
    assert trainer.train_dataset.epochs == (0, 1)
    given.run(resume=3)
    assert given.samples.epochs == (0, 1, 1)
    batch = next(iter(trainer.get_train_dataloader()))
    for copied in (
        copy.copy(batch),
        pickle.loads(pickle.dumps(batch)),
    ):  # pinning memory copies, workers pickle
        assert (positions(copied, 0) == positions(batch, 0)).all()


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_training_again_and_models_from_model_init(case):
    """A model comes in evaluation mode from the hub. The second training starts with what Accelerate
    has prepared for bf16.
    """
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    one = {"num_train_epochs": 1}
    given.model.eval()
    trainer = given.run(bf16=True, **one).trainer
    trainer.train()
    assert trainer.state.global_step == 2
    made = given.run(trainer={"model": None, "model_init": lambda: h.bert_classifier(0.1)}, **one)
    assert distance(made.weights[-1], given.run(**one).weights[-1]) == 0


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_the_sequence_to_sequence_trainer_generates(case):
    given = case(h.t5, h.token_samples(NUM_SAMPLES))
    one = {"num_train_epochs": 1}
    run = given.run(
        mixed(tf.Seq2SeqTrainer),
        kind=tf.Seq2SeqTrainingArguments,
        predict_with_generate=True,
        **one,
    )
    assert distance(run.weights[-1], given.run(**one).weights[-1]) == 0
    assert len(run.trainer.predict(given.samples[:4], max_new_tokens=4).predictions) == 4


@pytest.mark.slow("whole trainings; quick tests cover its parts")
class Unfreezing(tf.TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.requires_grad_(state.global_step > 0)
        model.classifier.requires_grad_(True)


@pytest.mark.parametrize("layout", [(16, 1), (4, 4)])
def test_layers_that_a_callback_unfreezes_are_trained_in_this_window(case, layout):
    """Trainer has fetched the window before it calls `on_step_begin`."""
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES), dropout=0.0)
    given.model.bert.requires_grad_(False)
    run = given.run(layout=layout, trainer={"callbacks": [Unfreezing()]}, **STILL)
    given.model.requires_grad_(True)
    reference = h.full_batch_gradient(given.model, h.pad_right(given.samples[WINDOW:]))
    assert h.relative_error(run.gradients[1], reference) < CLOSE


def test_adapters_and_activation_checkpointing(case):
    def adapted(dropout):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = get_peft_model(
                h.llama(0.1),
                LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "v_proj"]),
            )
        # what PEFT's documentation asks for under reentrant checkpointing
        model.enable_input_require_grads()
        return model

    given = case(adapted, h.token_samples(NUM_SAMPLES))
    one = {"num_train_epochs": 1}
    full = given.run(layout=(16, 1), **one)
    split = given.run(layout=(1, 16), **one)
    checkpointed = given.run(gradient_checkpointing=True, **one)
    assert weight_error(split, full) < CLOSE
    assert weight_error(checkpointed, full) < CLOSE
    assert distance(full.weights[-1], full.weights[0]) > 1e-6


@pytest.mark.parametrize(("precision", "rounding"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_mixed_precision(case, precision, rounding):
    """The layouts differ by roundings only; the full batch in this precision differs from float32
    by more than nothing.
    """
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))

    def first_gradient(layout, trainer_class=ExactTrainer):
        trainer = given.make(trainer_class, layout, max_steps=1, **{precision: True})
        enable_fp16_on_cpu(trainer.accelerator)  # for Trainer: ExactTrainer does it
        trainer.train()
        return trainer.run.gradients[0]

    exact_full = first_gradient((16, 1))
    exact_split = first_gradient((1, 16))
    assert h.relative_error(exact_split, exact_full) < 4 * rounding
    assert (
        h.relative_error(exact_full, given.run(layout=(16, 1), max_steps=1).gradients[0])
        > rounding / 100
    )
    assert h.norm(first_gradient((1, 16), tf.Trainer)) > 10 * h.norm(exact_full)


def test_what_is_left_of_a_broken_off_window_enters_no_other(case):
    """Trainer adds it to the next window's gradient."""

    class StopsFirstEpoch(tf.TrainerCallback):
        epochs = 0

        def on_epoch_begin(self, args, state, control, **kwargs):
            self.epochs += 1

        def on_substep_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = self.epochs == 1

    given = case(h.gpt2, h.token_samples(WINDOW), dropout=0.0)
    reference = h.full_batch_gradient(given.model, h.pad_right(given.samples))
    twice = {**STILL, "num_train_epochs": 2}
    run, plain = (
        given.run(c, trainer={"callbacks": [StopsFirstEpoch()]}, **twice)
        for c in (ExactTrainer, tf.Trainer)
    )
    assert len(run.gradients) == len(plain.gradients) == 1
    assert h.relative_error(run.gradients[0], reference) < CLOSE
    assert h.relative_error(plain.gradients[0], reference) > 0.1


REFUSED_ARGUMENTS = {
    "train_sampling_strategy 'group_by_length'": {"train_sampling_strategy": "group_by_length"},
    "train_sampling_strategy 'batch_rebalance'": {"train_sampling_strategy": "batch_rebalance"},
    "auto_find_batch_size changes the window": {"auto_find_batch_size": True},
    "torch_compile compiles the whole model": {"torch_compile": True},
    "use_liger_kernel computes the loss's gradient": {"use_liger_kernel": True},
    "'lomo' updates inside each backward": {"optim": tf.training_args.OptimizerNames.LOMO},
    "one process would use 2 GPUs": {"_n_gpu": 2},
}


def prepared(case, trainer_class=ExactTrainer, **more):
    return case(h.bert_classifier, h.class_samples(NUM_SAMPLES)).make(trainer_class, trainer=more)


@pytest.mark.parametrize("message", REFUSED_ARGUMENTS)
def test_arguments_that_cannot_be_made_exact_are_refused_by_name(case, message):
    trainer = prepared(case)
    for name, value in REFUSED_ARGUMENTS[message].items():
        setattr(trainer.args, name, value)
    weights = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert distance(trainer.model.state_dict(), weights) == 0


@pytest.mark.parametrize(
    ("kind", "words"), [("FSDP", "set fsdp_version to 2"), ("DEEPSPEED", "unsupported: DEEPSPEED")]
)
def test_fsdp1_and_deepspeed_are_refused(case, kind, words, monkeypatch):
    trainer = prepared(case)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType(kind))
    with pytest.raises(ConfigError, match=words):
        trainer.train()


@pytest.mark.parametrize(
    ("build", "make", "named"),
    [(h.gpt2, h.token_samples, True), (h.bert_classifier, h.class_samples, False)],
)
def test_label_smoothing_of_a_causal_lm_under_fsdp2_is_refused(
    case, build, make, named, monkeypatch
):
    """FSDP2 swaps the class for FSDPGPT2LMHeadModel, which is not in Trainer's list: it would not
    shift the labels.
    """
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ConfigError) as raised:
        case(build, make(4)).make(label_smoothing_factor=0.1).train()
    assert ("renames the class" in str(raised.value)) == named


def test_processes_that_would_train_alone_and_fsdp_that_is_not_on_are_refused(case, monkeypatch):
    trainer = prepared(case)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ConfigError,
        match=r"2 processes were launched, .* each would train alone.*; FSDP was requested",
    ):
        trainer.train()


def test_a_checkpoint_is_resumed_with_the_same_window_only(case):
    """24 samples: the window of 16, in another layout, is accepted."""
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    given.run(save_strategy="steps", save_steps=3)
    given.run(layout=(2, 8), resume=3)
    with pytest.raises(
        ConfigError, match=r"windows of 16 samples, .* gradient_accumulation_steps 2 are 8"
    ):
        given.run(layout=(4, 2), resume=3)


def test_auto_resumes_from_the_last_complete_checkpoint(case, tmp_path):
    """One that a killed run has left, with weights only, does not count, also for True."""
    folder = tmp_path / "left"
    assert last_complete_checkpoint(str(folder)) is None
    for name, text in [("checkpoint-3", "{}"), ("checkpoint-12", '{"a'), ("checkpoint-9", None)]:
        (folder / name).mkdir(parents=True)
        if text is not None:
            (folder / name / "trainer_state.json").write_text(text)
    assert last_complete_checkpoint(str(folder)) == str(folder / "checkpoint-3")
    given = case(h.bert_classifier, h.class_samples(NUM_SAMPLES))
    given.make(save_strategy="steps", save_steps=3).train(resume_from_checkpoint="auto")
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    for resume in ("auto", True):
        trainer = given.make()
        trainer.train(resume_from_checkpoint=resume)
        assert len(trainer.run.losses) == 1  # of 4 steps


class Streaming(IterableDataset):
    def __iter__(self):
        yield from h.class_samples(NUM_SAMPLES)


def test_streaming_datasets_are_refused(case):
    given = case(h.bert_classifier, Streaming())
    with pytest.raises(
        ConfigError, match="a streaming train_dataset has no fixed order: load it without streaming"
    ):
        given.run(max_steps=2)


@pytest.mark.parametrize(
    "method", ["get_train_dataloader", "_get_train_sampler", "get_batch_samples"]
)
def test_loaders_and_samplers_of_ones_own_are_refused(case, method):
    base = type("Own", (tf.Trainer,), {method: lambda *_, **__: pytest.fail("refused before")})
    with pytest.raises(ConfigError, match=f"Own.{method} overrides the order of samples"):
        prepared(case, mixed(base)).train()


def divides_again(self, model, inputs, num_items_in_batch=None):
    loss = self.compute_loss(model, self._prepare_inputs(inputs)) / 4
    self.accelerator.backward(loss)
    return loss.detach()


def never_asks_for_help(self, model, inputs, num_items_in_batch=None):
    loss = self.compute_loss(model, self._prepare_inputs(inputs))
    self.accelerator.backward(loss)
    return loss.detach()


def leaves_out_the_last(self, model, inputs, num_items_in_batch=None):
    self.number = 1 + getattr(self, "number", 0)
    if self.number % 4 == 0:
        return torch.zeros(())
    return ExactTrainer.training_step(self, model, inputs)


def trains_twice(self, model, inputs, num_items_in_batch=None):
    return ExactTrainer.training_step(self, model, inputs) + ExactTrainer.training_step(
        self, model, inputs
    )


def changes_its_inputs(self, model, inputs, num_items_in_batch=None):
    inputs["labels"] = inputs["labels"].roll(1, 0)
    return ExactTrainer.training_step(self, model, inputs)


def changes_them_in_place(self, model, inputs, num_items_in_batch=None):
    inputs["labels"].fill_(1)
    return ExactTrainer.training_step(self, model, inputs)


@pytest.mark.parametrize(
    ("step", "parent", "message"),
    [
        (changes_its_inputs, ExactTrainer, "changes the micro-batch"),
        (changes_them_in_place, ExactTrainer, "changes the micro-batch"),
        (
            divides_again,
            tf.Trainer,
            "was multiplied by 0.25: an overridden training_step scales it again",
        ),
        (never_asks_for_help, ExactTrainer, "must call super"),
        (leaves_out_the_last, ExactTrainer, "must call super"),
        (trains_twice, ExactTrainer, "called once for each micro-batch"),
    ],
)
def test_overridden_steps_that_would_not_be_exact_are_found(case, step, parent, message):
    own = type("Own", (parent,), {"training_step": step})
    with pytest.raises(ConfigError, match=message):
        prepared(case, mixed(own) if parent is tf.Trainer else own).train()


def keeps_a_number(self, model, inputs, num_items_in_batch=None):
    self.number = float(len(inputs["labels"]) + inputs["input_ids"].sum())
    return ExactTrainer.training_step(self, model, inputs)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_an_overridden_step_keeps_of_a_micro_batch_is_warned_of(case, caplog, keeps):
    """All micro-batches are computed in the last call, with the number of the last one."""
    own = {"training_step": keeps_a_number} if keeps else {}
    prepared(case, type("Own", (ExactTrainer,), own)).train()
    assert ("within the last call of Own.training_step" in caplog.text) is keeps


def test_windows_are_rehearsed_by_their_number_in_the_run(case):
    """Each epoch has one window: the first three and the ninth have a rehearsal."""
    given = case(h.bert_classifier, h.class_samples(WINDOW), dropout=0.0)
    numbers = []
    given.model.register_forward_pre_hook(lambda *_: numbers.append(torch.is_grad_enabled()))
    forwards = []

    class Counts(tf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            forwards.append(sum(numbers))
            numbers.clear()

    more = {"trainer": {"callbacks": [Counts()]}, "num_train_epochs": 10}
    given.run(layout=(4, 4), **more)
    assert [number > 4 for number in forwards[4:]] == [index == 8 for index in range(4, 10)]


def test_where_memory_runs_out_the_updates_are_the_same(case):
    """The control: Trainer raises the error."""
    given = case(h.gpt2, h.token_samples(NUM_SAMPLES))
    one = {"num_train_epochs": 1}
    full = given.run(layout=(16, 1), **one)
    trainer = given.make(layout=(8, 2), **one)
    device = Device(trainer.model, fits=40)
    trainer.train()
    assert device.failures
    assert weight_error(trainer.run, full) < CLOSE
    plain = given.make(tf.Trainer, layout=(8, 2), **one)
    Device(plain.model, fits=40)
    with pytest.raises(torch.OutOfMemoryError):
        plain.train()


class ClassWeights(LossOfMyOwn):
    """A mean over weights, which no count of labels is."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
        loss = F.cross_entropy(
            outputs.logits.flatten(0, 1), inputs["labels"].flatten(), torch.tensor([0.1, 1.0, 9.0])
        )
        return (loss, outputs) if return_outputs else loss


class OneNumberAWindow(tf.Trainer):
    """The loss is scaled by a number that belongs to no sample."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * (1 + torch.rand(()))


@pytest.mark.parametrize("base", [ClassWeights, OneNumberAWindow])
def test_weighted_means_and_losses_that_draw_are_exact(case, base):
    given = case(h.bert_token_classifier, h.tag_samples(NUM_SAMPLES))
    full, split = (given.run(mixed(base), layout) for layout in ((16, 1), (1, 16)))
    assert weight_error(split, full) < CLOSE
    assert split.losses == pytest.approx(full.losses, rel=CLOSE)
    plain_full, plain = (given.run(base, layout) for layout in ((16, 1), (1, 16)))
    assert weight_error(plain, plain_full) > 100 * CLOSE


class DrawsFromNumpy(tf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * (1 + np.random.rand())


def test_draws_that_are_no_draws_of_torch_are_refused(case):
    with pytest.raises(UnkeyedRandomness, match="cannot be tied to samples"):
        prepared(case, mixed(DrawsFromNumpy)).train()


def test_samples_without_targets_in_a_whole_window_are_refused_under_fp16(case):
    samples = [
        h.without_targets(s) if i < WINDOW else s for i, s in enumerate(h.tag_samples(NUM_SAMPLES))
    ]
    trainer = case(h.bert_token_classifier, samples).make(
        fp16=True, train_sampling_strategy="sequential"
    )
    with pytest.raises(DataError, match="no targets"):
        trainer.train()


def test_samples_with_several_images_or_none(case):
    given = case(images_and_text, image_samples(NUM_SAMPLES), dropout=0.0)
    loaded = {"data_collator": collate_images}
    still = {**STILL, "remove_unused_columns": False}
    run, plain = (
        given.run(trainer_class, (4, 4), trainer=loaded, **still)
        for trainer_class in (ExactTrainer, tf.Trainer)
    )
    for step, window in enumerate([given.samples[:WINDOW], given.samples[WINDOW:]]):
        reference = h.full_batch_gradient(given.model, collate_images(window))
        assert h.relative_error(run.gradients[step], reference) < CLOSE
        assert h.relative_error(plain.gradients[step], reference) > 0.01


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters()), None


def test_an_optimizer_that_needs_a_closure_is_refused(case):
    """Given to the trainer, and made by it."""

    class Own(ExactTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer, _ = lbfgs(self.model)
            return self.optimizer

    model = h.bert_classifier()
    for trainer in (prepared(case, model=model, optimizers=lbfgs(model)), prepared(case, Own)):
        weights = copy.deepcopy(trainer.model.state_dict())
        with pytest.raises(ConfigError, match="LBFGS computes the loss several times"):
            trainer.train()
        assert distance(trainer.model.state_dict(), weights) == 0
