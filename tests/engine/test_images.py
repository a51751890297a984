"""Samples with several images, one or none: every split of a window is the full batch."""

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from images import collate_images, image_samples, images_and_text
from steps import train_step
from windows import one_window, window_gradient

import hf_ga

NUM_SAMPLES = 18
IMAGES = {
    "none to two": {},
    "one": {"num_images": [1]},  # the rows of its grid look like those of samples
    "two or none": {"num_images": [2, 0], "num_patches": [1]},  # as many images as samples
    "always two": {"num_images": [2], "num_patches": [3]},
    "one or none": {"num_images": [0, 1], "num_patches": [1]},  # as LLaVA
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("whole_window", [False, True], ids=["one by one", "whole window"])
def test_every_split_is_the_full_batch(kind, whole_window):
    samples = image_samples(NUM_SAMPLES, **IMAGES[kind])
    model = images_and_text()
    batch = collate_images(samples)
    reference = h.full_batch_gradient(model, batch)
    full = h.full_batch_gradient(model, batch, model.head.weight.dtype)
    for size in (1, 5, NUM_SAMPLES):
        window = one_window(samples, size, collate_images, pad_to_window=whole_window)
        gradient, _ = window_gradient(model, window)
        h.assert_promise_1(gradient, full, reference)
    batches = [collate_images(samples[:4]), collate_images(samples[4:])]
    naive = h.naive_gradient(model, batches, 2)
    assert h.relative_error(naive, reference) > 1e-2


def test_training_steps_with_dropout_of_the_texts():
    """Keyed by samples, whatever images they have."""
    samples = image_samples(NUM_SAMPLES)
    gradients = [
        window_gradient(images_and_text(dropout=0.2), one_window(samples, size, collate_images))[0]
        for size in (NUM_SAMPLES, 4)
    ]
    assert h.relative_error(gradients[1], gradients[0]) < 1e-6
    plain, _ = window_gradient(images_and_text(), one_window(samples, 4, collate_images))
    assert h.relative_error(plain, gradients[0]) > 1e-2, "there is dropout"


@pytest.mark.parametrize("kind", IMAGES)
def test_dropout_of_patches_is_exact_or_refused_by_its_line(kind):
    """Patches belong to no known sample, unless each sample has equally many."""
    samples = image_samples(NUM_SAMPLES, **IMAGES[kind])
    model = images_and_text(image_dropout=0.2)
    whole, _ = window_gradient(model, one_window(samples, NUM_SAMPLES, collate_images))
    plain, _ = window_gradient(images_and_text(), one_window(samples, NUM_SAMPLES, collate_images))
    assert h.relative_error(plain, whole) > 1e-2, "there is dropout"
    for size in (5, 4, 1):
        window = one_window(samples, size, collate_images)
        if kind == "always two":
            assert h.relative_error(window_gradient(model, window)[0], whole) < 1e-6
        else:
            with pytest.raises(hf_ga.UnkeyedRandomness, match=r"dropout of shape .*images\.py"):
                window_gradient(model, window)


def test_the_loss_falls():
    """An epoch of updates, also over windows without images."""
    samples = image_samples(NUM_SAMPLES, num_images=[1, 2, 0, 0, 0, 0])
    model = images_and_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    windows = hf_ga.WindowLoader(
        samples,
        collate_images,
        accelerator=Accelerator(),
        per_device_batch_size=2,
        global_batch_size=3,
    )
    losses = []
    for _ in range(4):
        for window in windows:
            losses.append(train_step(Accelerator(), model, optimizer, window).loss)
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
