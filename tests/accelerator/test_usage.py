"""What people use of an Accelerator around the documented loop works as they know it: lengths,
types, samplers, evaluations, metrics; and the split of a window does not show in it.
"""

from collections import Counter
from functools import cache, partial
from itertools import chain, repeat

import accelerate
import helpers as h
import numpy as np
import pytest
import torch
import transformers as tf
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from attempts import Attempt, documented
from documented_loop import (
    CASES,
    EPS,
    FULL_BATCH,
    LAYOUTS,
    LEARNING_RATE,
    TWO_STEPS,
    UNEVEN,
    WINDOW,
    Layout,
    distance,
    reset_states,
    trained_weights,
)
from forked import on_ranks, without_errors
from images import collate_images, image_samples, images_and_text
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from hf_ga import Accelerator
from hf_ga.engine.checks.statistic_check import WatchedTensor
from hf_ga.errors import HfGaError

NUM_SAMPLES = 37
TENSORS = {torch.Tensor, WatchedTensor}  # none that computes its values later
WINDOWS = [16, 16, 5]
CLOSE = 1e-6


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


def own_loss(accelerator, model, batch):
    accelerator.backward(model(**batch).loss)


def numbered_samples(num_samples=NUM_SAMPLES):
    """As `h.class_samples`; the first token of each says which one it is."""
    samples = h.class_samples(num_samples)
    return [
        {**sample, "input_ids": [2 + i, *sample["input_ids"][1:]]}
        for i, sample in enumerate(samples)
    ]


def shuffled(samples, batch_size, **options):
    return DataLoader(
        samples, batch_size=batch_size, collate_fn=h.pad_right, shuffle=True, **options
    )


class Training:
    """A classifier whose loop keeps which samples each update saw, on all ranks together.

    Attributes:
        windows: for each epoch, the numbers of the samples of each update.
        left: samples of micro-batches behind the last update.
    """

    def __init__(
        self,
        layout,
        make_loader=shuffled,
        accelerator_class=Accelerator,
        seed=2,
        device_specific=False,
        **options,
    ):
        self.accelerator = layout.make(accelerator_class, **options)
        set_seed(seed, device_specific=device_specific)
        self.loader = make_loader(numbered_samples(), layout.per_device_batch_size)
        self.model = h.bert_classifier(0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, eps=EPS)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.model, self.optimizer, self.loader
        )
        self.windows = []
        self.left = []

    def epoch(self, num_updates=None, between=None):
        """num_updates: leaves the epoch after so many. between: is called after each update."""
        self.model.train()
        self.windows.append([])
        self.left = []
        for batch in self.loader:
            seen = batch["input_ids"][:, 0]
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            seen = self.accelerator.gather_for_metrics(seen)  # without rehearsals and repetitions
            self.left += (seen - 2).tolist()
            if self.accelerator.sync_gradients:
                self.windows[-1].append(self.left)
                self.left = []
                if len(self.windows[-1]) == num_updates:
                    break
                if between is not None:
                    between(self)

    @property
    def weights(self):
        return trained_weights(self.accelerator.unwrap_model(self.model))


def as_sets(windows):
    """The order within a window is the layout's."""
    return [[sorted(window) for window in epoch] for epoch in windows]


def two_epochs(layout, make_loader=shuffled, **options):
    training = Training(layout, make_loader, **options)
    training.epoch()
    training.epoch()
    return training


@cache
def found_in_two_epochs(layout, make_loader=shuffled):
    """Weights and windows of a run that several tests compare with; it is trained once."""
    training = two_epochs(layout, make_loader)
    return training.weights, training.windows


# -- the loader


@pytest.mark.parametrize("layout", [FULL_BATCH, TWO_STEPS, Layout(3, 4)], ids=str)
def test_len_is_that_of_accelerate(layout):
    """And as many batches come."""
    expected = len(Training(layout, accelerator_class=accelerate.Accelerator).loader)
    ours = Training(layout)
    assert len(ours.loader) == expected
    num_batches = 0
    for batch in ours.loader:
        with ours.accelerator.accumulate(ours.model):
            own_loss(ours.accelerator, ours.model, batch)
            ours.optimizer.step()
            ours.optimizer.zero_grad()
        num_batches += 1
    assert num_batches == expected


def test_each_sample_is_seen_once_in_an_epoch_in_another_order():
    training = two_epochs(TWO_STEPS)
    first, second = training.windows
    for epoch in (first, second):
        assert [len(window) for window in epoch] == WINDOWS
        assert sorted(chain(*epoch)) == [*range(NUM_SAMPLES)]
    assert first != second
    assert training.left == []


def test_the_seed_chooses_the_order():
    orders = []
    for seed in (2, 3, 2):
        training = Training(TWO_STEPS, seed=seed)
        training.epoch()
        orders.append(as_sets(training.windows))
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]


def test_set_epoch_chooses_the_order():
    orders = []
    for epoch in (0, 1):
        training = Training(TWO_STEPS)
        training.loader.set_epoch(epoch)
        training.epoch()
        orders += as_sets(training.windows)
    assert orders == as_sets(found_in_two_epochs(TWO_STEPS)[1])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("layout", [FULL_BATCH, UNEVEN], ids=str)
def test_global_random_generators_stay_as_they_are(layout):
    """Shuffling and dropout draw from none of them."""
    training = Training(layout)
    before = h.global_random_states()
    training.epoch()
    assert h.global_random_states() == before


def test_global_random_generators_do_not_matter():
    """Numbers that are drawn between updates change nothing."""

    def draw(training):
        torch.rand(3)
        np.random.rand(3)

    weights, windows = found_in_two_epochs(TWO_STEPS)
    training = Training(TWO_STEPS)
    training.epoch(between=draw)
    training.epoch(between=draw)
    assert training.windows == windows
    assert distance(training.weights, weights) == 0


class Dictionary(dict):
    """A batch with a method of its own, as BatchEncoding."""

    def to(self, device):
        return Dictionary({name: value.to(device) for name, value in self.items()})


@pytest.mark.parametrize("kind", [tf.BatchEncoding, dict, Dictionary])
def test_batches_keep_their_type(kind):
    seen = []

    def step(accelerator, model, batch):
        seen.append(type(batch))
        if kind is not dict:
            batch = batch.to(accelerator.device)
        own_loss(accelerator, model, batch)

    attempt = Attempt(documented(step), collate=lambda samples: kind(h.pad_right(samples)))
    attempt.run(Accelerator, TWO_STEPS)
    assert set(seen) == {kind}


def test_tuples_stay_tuples():
    seen = []
    case = CASES["tuples"]

    def step(accelerator, model, batch):
        seen.append(type(batch))
        accelerator.backward(case.compute_loss(model, batch))

    attempt = Attempt(documented(step), case.build, case.make_samples(WINDOW), case.collate)
    attempt.run(Accelerator, TWO_STEPS)
    assert set(seen) == {tuple}


# -- samplers: the order is the sampler's


def in_order(samples, batch_size, **options):
    return DataLoader(samples, batch_size=batch_size, collate_fn=h.pad_right, **options)


def weighted(samples, batch_size, generator=None):
    sampler = WeightedRandomSampler([1.0 + i for i in range(37)], 37, generator=generator)
    return in_order(samples, batch_size, sampler=sampler)


def weighted_with_generator(samples, batch_size, seed=5):
    return weighted(samples, batch_size, torch.Generator().manual_seed(seed))


def subset(samples, batch_size):
    """Shuffled, without sample 0."""
    return shuffled(Subset(samples, range(36, 0, -1)), batch_size)


def in_batches(samples, batch_size):
    return DataLoader(
        samples,
        batch_sampler=BatchSampler(SequentialSampler(samples), batch_size, drop_last=False),
        collate_fn=h.pad_right,
    )


def shuffled_in_batches(samples, batch_size):
    generator = torch.Generator().manual_seed(5)
    sampler = BatchSampler(RandomSampler(samples, generator=generator), batch_size, False)
    return DataLoader(samples, batch_sampler=sampler, collate_fn=h.pad_right)


LOADERS = [
    shuffled,
    in_order,
    weighted,
    weighted_with_generator,
    subset,
    in_batches,
    shuffled_in_batches,
]


@pytest.mark.parametrize(
    ("make_loader", "layout"),
    [
        (weighted, TWO_STEPS),
        (weighted_with_generator, TWO_STEPS),
        (in_batches, TWO_STEPS),
        (shuffled, Layout(4, 4)),
    ],
)
def test_samplers_in_every_layout(make_loader, layout):
    weights, windows = found_in_two_epochs(FULL_BATCH, make_loader)
    found, found_windows = found_in_two_epochs(layout, make_loader)
    assert as_sets(found_windows) == as_sets(windows)
    assert distance(found, weights) < CLOSE


@pytest.mark.parametrize("layout", [FULL_BATCH, TWO_STEPS], ids=str)
@pytest.mark.parametrize("make_loader", [in_order, in_batches])
def test_without_shuffling_the_order_is_the_dataset_s(make_loader, layout):
    windows = [[*range(16)], [*range(16, 32)], [*range(32, 37)]]
    assert as_sets(found_in_two_epochs(layout, make_loader)[1]) == [windows, windows]


@pytest.mark.parametrize("make_loader", [weighted, weighted_with_generator])
def test_a_weighted_sampler_repeats_samples(make_loader):
    """Other ones in every epoch."""
    _, windows = found_in_two_epochs(TWO_STEPS, make_loader)
    first, second = (sorted(chain(*epoch)) for epoch in windows)
    assert len(first) == NUM_SAMPLES
    assert len({*first}) < NUM_SAMPLES
    assert first != second


def test_a_subset_is_all_that_is_seen():
    for epoch in found_in_two_epochs(TWO_STEPS, subset)[1]:
        assert sorted(chain(*epoch)) == [*range(1, NUM_SAMPLES)]


def shuffled_with_generator(samples, batch_size, seed=5):
    return shuffled(samples, batch_size, generator=torch.Generator().manual_seed(seed))


def test_a_generator_chooses_the_order():
    """Whatever the seed of the run."""
    make_loader = shuffled_with_generator
    one, same = (two_epochs(TWO_STEPS, make_loader, seed=seed).windows for seed in (2, 3))
    other = two_epochs(TWO_STEPS, partial(make_loader, seed=6)).windows
    assert one == same
    assert one != other


@pytest.mark.parametrize("layout", [FULL_BATCH, UNEVEN], ids=str)
def test_drop_last_leaves_the_short_window_out(layout):
    training = two_epochs(layout, partial(shuffled, drop_last=True))
    for epoch in training.windows:
        assert [len(window) for window in epoch] == [16, 16]


def test_workers_change_nothing():
    weights, windows = found_in_two_epochs(TWO_STEPS)
    training = two_epochs(TWO_STEPS, partial(shuffled, num_workers=2))
    assert training.windows == windows
    assert distance(training.weights, weights) == 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(numbered_samples())


def streamed(samples, batch_size):
    return DataLoader(Stream(), batch_size=batch_size, collate_fn=h.pad_right)


@pytest.mark.parametrize("layout", [TWO_STEPS, Layout(4, 4)], ids=str)
def test_a_stream_is_right_or_refused(layout):
    try:
        reference = two_epochs(FULL_BATCH, streamed)
    except HfGaError:
        return
    training = two_epochs(layout, streamed)
    assert as_sets(training.windows) == as_sets(reference.windows)
    assert distance(training.weights, reference.weights) < CLOSE


# -- epochs


def left_and_begun_again(layout):
    training = Training(layout)
    training.epoch(num_updates=1)
    training.epoch()
    return training


def test_an_epoch_that_is_left_begins_the_next_one():
    first, second = as_sets(found_in_two_epochs(FULL_BATCH)[1])
    full, *split = map(left_and_begun_again, (FULL_BATCH, TWO_STEPS, UNEVEN))
    for training in (full, *split):
        assert as_sets(training.windows) == [first[:1], second]
        assert distance(training.weights, full.weights) < CLOSE


@pytest.mark.parametrize("layout", [FULL_BATCH, UNEVEN], ids=str)
def test_skipped_batches_of_a_fresh_loader_are_the_first_windows(layout):
    training = Training(layout)
    steps = training.accelerator.gradient_accumulation_steps
    loader = training.loader
    training.loader = training.accelerator.skip_first_batches(loader, 1 * steps)
    training.epoch()
    training.loader = loader
    training.epoch()
    first, second = as_sets(found_in_two_epochs(FULL_BATCH)[1])
    assert as_sets(training.windows) == [first[1:], second]


# -- evaluation and metrics


def evaluate(training, loader):
    """The accuracy, and which samples were counted, as the examples of Accelerate do it."""
    training.model.eval()
    right = 0
    counted = []
    for batch in loader:
        with torch.no_grad():
            outputs = training.model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references, first = training.accelerator.gather_for_metrics(
            (predictions, batch["labels"], batch["input_ids"][:, 0])
        )
        right += int((predictions == references).sum())
        counted += (first - 2).tolist()
    training.model.train()
    return right, sorted(counted)


@pytest.mark.parametrize(
    ("layout", "own_loader"),
    [(UNEVEN, True), (UNEVEN, False)],
)
def test_evaluations_within_an_epoch_change_nothing(layout, own_loader):
    weights, windows = found_in_two_epochs(layout)
    training = Training(layout)
    loader = training.loader
    if own_loader:
        loader = training.accelerator.prepare(in_order(numbered_samples(), 8))
    found = []
    training.epoch()
    found.append(evaluate(training, loader))
    training.epoch(between=(lambda t: found.append(evaluate(t, loader))) if own_loader else None)
    assert training.windows == windows
    assert distance(training.weights, weights) == 0
    assert len(found) == (4 if own_loader else 1)
    for right, counted in found:
        assert counted == [*range(NUM_SAMPLES)]
        assert 0 <= right <= NUM_SAMPLES


def drawing(batches):
    for batch in batches:
        torch.rand(len(batch["labels"]))
        np.random.rand()
        yield batch


@pytest.mark.parametrize("layout", [FULL_BATCH, TWO_STEPS])
def test_an_evaluation_may_come_before_the_forward(layout):
    """Neither its draws nor those of its loader are the micro-batch's."""
    weights, _ = found_in_two_epochs(layout)
    training = Training(layout)
    windows = training.loader
    loader = training.accelerator.prepare(in_order(numbered_samples(), 8))
    for _ in range(2):
        training.loader = (batch for batch in windows if evaluate(training, drawing(loader)))
        training.epoch()
    assert distance(training.weights, weights) == 0


def test_the_iterator_of_an_evaluation_may_be_kept():
    """As trainers do that validate on one batch after the other."""
    weights, _ = found_in_two_epochs(TWO_STEPS)
    training = Training(TWO_STEPS)
    loader = training.accelerator.prepare(in_order(numbered_samples(), 8))
    batches = chain.from_iterable(repeat(loader))

    def validate(training):
        training.model.eval()
        next(batches)
        training.model.train()

    for _ in range(2):
        training.epoch(between=validate)
    assert distance(training.weights, weights) == 0


def metrics_while_training(layout, accelerator_class=Accelerator):
    """(samples that `gather_for_metrics` counted, types of the logits) of one epoch."""
    training = Training(layout, shuffled, accelerator_class)
    counted = []
    types = set()
    for batch in training.loader:
        with training.accelerator.accumulate(training.model):
            outputs = training.model(**batch)
            types.add(type(outputs.logits))
            predictions = outputs.logits.argmax(dim=-1)
            assert predictions.shape == batch["labels"].shape
            training.accelerator.backward(outputs.loss)
            training.optimizer.step()
            training.optimizer.zero_grad()
        ids = batch["input_ids"][:, 0]
        first = training.accelerator.gather_for_metrics(ids)
        assert set(first.tolist()) <= set(training.accelerator.gather(ids).tolist())
        counted += (first - 2).tolist()
    return counted, types


@pytest.mark.parametrize("layout", [FULL_BATCH, UNEVEN], ids=str)
def test_metrics_while_training_count_each_sample_once(layout):
    counted, types = metrics_while_training(layout)
    assert sorted(counted) == [*range(NUM_SAMPLES)]
    assert types <= TENSORS


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("num_processes", [2, 3])
def test_metrics_while_training_on_several_ranks(num_processes):
    for layout in LAYOUTS[num_processes]:
        work = partial(metrics_while_training, layout)
        for found in without_errors(on_ranks(work, num_processes)):
            counted, types = found
            assert sorted(counted) == [*range(NUM_SAMPLES)]
            assert types <= TENSORS


def test_logits_are_a_tensor_that_can_be_used():
    """Also those of a causal language model, whose loss may never compute them all."""
    sums = []

    def step(accelerator, model, batch):
        outputs = model(**batch)
        assert type(outputs.logits) in TENSORS
        assert outputs.logits.shape == (*batch["input_ids"].shape, h.VOCABULARY)
        sums.append(outputs.logits.softmax(-1).sum(-1).mean().item())
        accelerator.backward(outputs.loss)

    attempt = Attempt(documented(step), h.gpt2, h.token_samples(WINDOW))
    weights = attempt.run(Accelerator, TWO_STEPS)
    assert sums == pytest.approx([1.0] * len(sums))
    assert distance(weights, attempt.full_batch()) < CLOSE


def test_the_loss_that_is_logged_is_the_micro_batch_s():
    """`backward` changes no value that the loop holds."""
    found = []

    def step(accelerator, model, batch):
        loss = model(**batch).loss
        before = loss.detach().clone()
        accelerator.backward(loss)
        found.append((loss.detach() - before).abs().item())

    Attempt(documented(step)).run(Accelerator, TWO_STEPS)
    assert max(found) == 0


# -- what is prepared, when


def prepared_apart(layout, order):
    """The documented loop, whose objects are prepared one by one, in an order of letters."""
    accelerator = layout.make(Accelerator)
    set_seed(2)
    samples = numbered_samples()
    model = h.bert_classifier(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.9**update)
    loader = shuffled(samples, layout.per_device_batch_size)
    objects = {"m": model, "o": optimizer, "l": loader, "s": scheduler}
    for letters in order.split():
        prepared = accelerator.prepare(*(objects[letter] for letter in letters))
        prepared = prepared if len(letters) > 1 else (prepared,)
        objects |= dict(zip(letters, prepared, strict=True))
    for _ in range(2):
        objects["m"].train()
        for batch in objects["l"]:
            with accelerator.accumulate(objects["m"]):
                accelerator.backward(objects["m"](**batch).loss)
                objects["o"].step()
                objects["s"].step()
                objects["o"].zero_grad()
    return trained_weights(model)


@cache
def prepared_together():
    """The reference: the full batch, and all objects in one call."""
    return prepared_apart(FULL_BATCH, "mols")


@pytest.mark.parametrize("order", ["mo l s", "l mos", "s l o m"])
def test_objects_that_are_prepared_one_by_one(order):
    assert distance(prepared_apart(TWO_STEPS, order), prepared_together()) < CLOSE


def test_two_optimizers_of_one_model():
    weights = {}
    for layout in (FULL_BATCH, TWO_STEPS):
        accelerator = layout.make(Accelerator)
        set_seed(2)
        model = h.bert_classifier(0.1)
        parts = [model.bert.parameters(), model.classifier.parameters()]
        optimizers = [torch.optim.AdamW(part, lr=LEARNING_RATE, eps=EPS) for part in parts]
        loader = shuffled(numbered_samples(), layout.per_device_batch_size)
        model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
        for batch in loader:
            with accelerator.accumulate(model):
                own_loss(accelerator, model, batch)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        weights[layout] = trained_weights(model)
    assert distance(weights[TWO_STEPS], weights[FULL_BATCH]) < CLOSE


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_accumulation_steps_that_are_set_later(when):
    """As scripts do that read them from a file."""
    accelerator = Layout(8, 1).make(Accelerator)
    set_seed(2)
    if when == "before prepare":
        accelerator.gradient_accumulation_steps = 2
    model = h.bert_classifier(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    loader = shuffled(numbered_samples(), 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if when == "after prepare":
        accelerator.gradient_accumulation_steps = 2
    num_updates = 0
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                own_loss(accelerator, model, batch)
                optimizer.step()
                optimizer.zero_grad()
                num_updates += accelerator.sync_gradients
    assert num_updates == 2 * len(WINDOWS)
    assert distance(trained_weights(model), found_in_two_epochs(FULL_BATCH)[0]) < CLOSE


def test_accumulation_steps_follow_from_the_global_batch():
    """Known as soon as the loader is prepared: scripts compute their numbers of steps from it."""
    accelerator = Training(UNEVEN).accelerator
    assert accelerator.gradient_accumulation_steps == 6


def test_samplers_of_accelerate_do_not_make_the_same_updates():
    """The control: the windows are the same, what is learnt is not."""
    reference, training = (
        two_epochs(layout, in_order, accelerator_class=accelerate.Accelerator)
        for layout in (FULL_BATCH, TWO_STEPS)
    )
    assert as_sets(training.windows) == as_sets(reference.windows)
    assert distance(training.weights, reference.weights) > 1e-3


def test_training_again_after_free_memory():
    """As `find_executable_batch_size` does: a smaller batch, everything else anew."""
    reference, _ = found_in_two_epochs(FULL_BATCH)
    accelerator = Layout(8, 1).make(Accelerator)
    found = []
    for _ in range(2):
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = 2
        set_seed(2)
        model = h.bert_classifier(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
        loader = shuffled(numbered_samples(), 8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(2):
            model.train()
            for batch in loader:
                with accelerator.accumulate(model):
                    own_loss(accelerator, model, batch)
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(trained_weights(model))
    assert distance(found[0], reference) < CLOSE
    assert distance(found[1], reference) < CLOSE


# -- options of Accelerate


ERRORS = {"ConfigError", "DataError", "LossNotAdditive", "UnkeyedRandomness", "ProcessFailed"}
OPTIONS = {
    "split_batches": {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "dispatch_batches": {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
    "even_batches": {"dataloader_config": DataLoaderConfiguration(even_batches=False)},
    "seedable": {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_one_process_are_right_or_refused(name):
    try:
        training = two_epochs(TWO_STEPS, **OPTIONS[name])
    except HfGaError:
        return
    assert distance(training.weights, found_in_two_epochs(FULL_BATCH)[0]) < CLOSE


def test_a_plugin_that_ignores_the_end_of_the_loader():
    """The short window of an epoch is a window all the same, or the plugin is refused."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    try:
        training = two_epochs(Layout(8, 1), gradient_accumulation_plugin=plugin)
    except HfGaError:
        return
    assert training.left == []
    assert as_sets(training.windows) == as_sets(found_in_two_epochs(FULL_BATCH)[1])


def weights_and_windows(layout, make_loader=shuffled, **options):
    training = two_epochs(layout, make_loader, **options)
    return training.weights, training.windows


@pytest.mark.slow("starts processes")
def test_samplers_on_two_ranks():
    """The ranks share each window; no rank ignores the sampler.

    `set_seed(seed, device_specific=True)` seeds each rank differently; the first one's counts.
    """

    def work():
        return [
            weights_and_windows(Layout(4, 2), make_loader, device_specific=True)
            for make_loader in LOADERS
        ]

    for rank in without_errors(on_ranks(work, 2, limit=120)):
        for make_loader, (weights, windows) in zip(LOADERS, rank, strict=True):
            expected, expected_windows = found_in_two_epochs(FULL_BATCH, make_loader)
            assert as_sets(windows) == as_sets(expected_windows), make_loader
            assert distance(weights, expected) < CLOSE, make_loader


def local_sgd():
    """Weights that are averaged after every second update, which each rank makes by itself."""
    training = Training(Layout(4, 2))
    accelerator = training.accelerator
    model = training.model
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for _ in range(2):
            for batch in training.loader:
                with accelerator.accumulate(model):
                    own_loss(accelerator, model, batch)
                    training.optimizer.step()
                    training.optimizer.zero_grad()
                    local.step()
    return training.weights


@pytest.mark.slow("starts processes")
def test_local_sgd_is_refused():
    """It asks for other updates than those of the full batch."""
    for error in on_ranks(local_sgd, 2):
        assert "LocalSGD lets processes train apart" in str(error)
        assert "leave it out" in str(error)


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_two_ranks_are_right_or_refused(name):
    """With `split_batches` the batch of the loader is that of both ranks."""
    layout = Layout(8, 2) if name == "split_batches" else Layout(4, 2)
    found = on_ranks(partial(weights_and_windows, layout, **OPTIONS[name]), 2)
    if all(isinstance(one, str) for one in found):
        assert all(one.split(":")[0] in ERRORS for one in found), found
        return
    expected, expected_windows = found_in_two_epochs(FULL_BATCH)
    for weights, windows in found:
        assert as_sets(windows) == as_sets(expected_windows)
        assert distance(weights, expected) < CLOSE


@pytest.mark.slow("starts processes")
def test_evaluations_on_two_ranks_count_each_sample_once():
    def work():
        training = Training(Layout(4, 2))
        loader = training.accelerator.prepare(in_order(numbered_samples(), 4))
        training.epoch()
        return evaluate(training, loader)

    for found in without_errors(on_ranks(work, 2)):
        _, counted = found
        assert Counter(counted) == Counter(range(NUM_SAMPLES))


def test_samples_with_several_images_or_none():
    """The loop passes the whole batch: it is computed from samples, each with its own images."""
    attempt = Attempt(documented(own_loss), images_and_text, image_samples(WINDOW), collate_images)
    expected = attempt.full_batch()
    for layout in (TWO_STEPS, UNEVEN):
        assert distance(attempt.run(Accelerator, layout), expected) < CLOSE
    assert distance(attempt.run(accelerate.Accelerator, TWO_STEPS), expected) > 1e-4
