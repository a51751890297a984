"""Ragged samples for every kind of head, and a plain padding collate function. Independent of
hf_ga.

The 8 samples of a window have 4 to 21 tokens, and their numbers of targets differ by more than a
factor of 3 if the head has targets per token.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

NUM_CLASSES = 3
NUM_CHOICES = 3
IGNORED = -100
# Ids of plain tokens.
FIRST_ID = 32
LAST_ID = 96
LENGTHS = (5, 21, 12, 4, 17, 9, 20, 6)
IMAGE_SIZE = 32
# Samples with a truncated answer (start or end); question answering ignores these targets.
CUT_STARTS = (1, 6)
CUT_ENDS = (1, 2, 6)
BEYOND = 1000
# Architectures with one batch width only: the longest sample, rounded up to the size of their
# chunks or tables.
WIDTHS = {"reformer": 24, "nystromformer": 24, "perceiver": 64}

# kind of head -> attributes of its config
KINDS: dict[str, dict[str, Any]] = {
    "causal LM": {},
    "causal LM with router loss": {"output_router_logits": True},
    "masked LM": {},
    "sequence classification": {"num_labels": NUM_CLASSES},
    "regression": {"num_labels": 1, "problem_type": "regression"},
    "multi-label": {"num_labels": NUM_CLASSES, "problem_type": "multi_label_classification"},
    "token classification": {"num_labels": NUM_CLASSES},
    "question answering": {"num_labels": 2},
    "multiple choice": {},
    "seq2seq": {},
    "next sentence": {},
    "pre-training": {},
    "image classification": {"num_labels": NUM_CLASSES},
}
Sample = dict[str, Any]


def make_samples(
    kind: str, class_name: str, config: PreTrainedConfig, seed: int = 0
) -> list[Sample]:
    """Make 8 samples for a head, as lists of numbers.

    Args:
        kind: A key of `KINDS`.
        class_name: The class of the model, on which the names of pre-training labels depend.
        config: The config of the model.
        seed: The seed of the samples.
    """
    rng = np.random.default_rng(seed)
    if kind == "image classification" and class_name.startswith("ImageGPT"):
        # Its pixels are tokens.
        return [
            {"input_ids": rng.integers(0, FIRST_ID, 16).tolist(), "labels": i % NUM_CLASSES}
            for i in range(len(LENGTHS))
        ]
    if kind == "image classification":
        return [_image_sample(rng, config, i) for i in range(len(LENGTHS))]
    if kind == "seq2seq" and not config.is_encoder_decoder:
        # A decoder that continues after its audio or image input.
        kind = "causal LM"
    vocab_size = getattr(config.get_text_config(), "vocab_size", None) or LAST_ID
    last = min(LAST_ID, vocab_size)
    end = end_token(config)
    texts = [_tokens(rng, length, last, end) for length in LENGTHS]
    targets = reversed(texts)
    samples = [
        _with_labels(kind, ids, target, rng, i)
        for i, (ids, target) in enumerate(zip(texts, targets, strict=True))
    ]
    return [
        {**s, **_more_labels(class_name, s, rng), **_more_inputs(class_name, s, config, rng)}
        for s in samples
    ]


def end_token(config: PreTrainedConfig) -> int | None:
    """Return the id that ends every sample (BART's classifier reads it there), if it is not the
    padding id.
    """
    text = config.get_text_config()
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, list | tuple):
        end = end[0]
    if not isinstance(end, int) or end < 0:
        return None
    if end == getattr(text, "pad_token_id", None):
        return None
    return end


class PaddingCollator:
    """A collate function that pads every list to the longest of the batch: token ids with the
    padding id, labels with -100, the rest with 0.

    Args:
        pad_id: The padding id.
        width: Pad to this many tokens instead, if no sample is longer.
    """

    def __init__(self, pad_id: int, width: int = 0) -> None:
        self.pad_id = pad_id
        self.width = width

    def __call__(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Collate samples."""
        return {
            name: self._padded([sample[name] for sample in samples], self._filler(name))
            for name in samples[0]
        }

    def _filler(self, name: str) -> int:
        """Return the number with which an entry is padded."""
        if "labels" in name:
            return IGNORED
        if name.endswith("input_ids"):
            return self.pad_id
        return 0

    def _padded(self, values: list[Any], filler: int) -> Tensor:
        """Pad the values of an entry on all axes, and stack them."""
        arrays = [np.asarray(value) for value in values]
        dtype = arrays[0].dtype
        shape = np.max([array.shape for array in arrays], axis=0).astype(int)
        are_tokens = len(shape) > 0 and dtype.kind == "i"
        if self.width and are_tokens:
            shape[-1] = max(self.width, shape[-1])
        padded = np.full((len(arrays), *shape), filler, dtype=dtype)
        for row, array in enumerate(arrays):
            own_part = tuple(slice(size) for size in array.shape)
            padded[(row, *own_part)] = array
        tensor = torch.from_numpy(padded)
        return tensor.float() if tensor.is_floating_point() else tensor.long()


def _tokens(rng: np.random.Generator, length: int, last: int, end: int | None) -> list[int]:
    """Draw the token ids of a text, below `last`, with `end` as the last one if there is one."""
    ids = rng.integers(FIRST_ID, last, length).tolist()
    if end is not None:
        ids[-1] = end
    return ids


def _with_labels(
    kind: str, ids: list[int], target: list[int], rng: np.random.Generator, index: int
) -> Sample:
    """Make the sample of a text.

    Args:
        kind: A key of `KINDS`.
        ids: The token ids of the text.
        target: Those of the text to generate from it.
        rng: Draws labels.
        index: The number of the sample.
    """
    sample: Sample = {"input_ids": ids, "attention_mask": [1] * len(ids)}
    if kind.startswith("causal LM"):
        num_ignored = 2 if index % 2 else 0
        return {**sample, "labels": [IGNORED] * num_ignored + ids[num_ignored:]}
    if kind in ("masked LM", "pre-training"):
        return {**sample, "labels": _masked(ids, rng)}
    if kind == "token classification":
        return {**sample, "labels": _masked([i % NUM_CLASSES for i in ids], rng)}
    if kind == "seq2seq":
        return {**sample, "labels": target}
    if kind == "question answering":
        start, end = sorted(rng.integers(0, len(ids), 2).tolist())
        if index in CUT_STARTS:
            start = BEYOND
        if index in CUT_ENDS:
            end = BEYOND
        return {**sample, "start_positions": start, "end_positions": end}
    if kind == "multiple choice":
        choices = [ids]
        for _ in range(NUM_CHOICES - 1):
            others = rng.integers(FIRST_ID, max(ids) + 1, len(ids) - 1)
            choices.append([*others.tolist(), ids[-1]])
        return {
            "input_ids": choices,
            "attention_mask": [[1] * len(ids)] * NUM_CHOICES,
            "labels": index % NUM_CHOICES,
        }
    return {**sample, "labels": _sample_label(kind, rng, index)}


def _masked(labels: list[int], rng: np.random.Generator) -> list[int]:
    """Replace labels by -100, so that the numbers of targets of samples differ much: about half of
    the labels of short samples, and 70 % or none of those of long ones. Never the second label.
    """
    share = 0.5
    if len(labels) > LENGTHS[0]:
        share = 0.7 if rng.integers(2) else 0.0
    masked = []
    for i, label in enumerate(labels):
        is_kept = i == 1 or rng.random() >= share
        masked.append(label if is_kept else IGNORED)
    return masked


def _sample_label(kind: str, rng: np.random.Generator, index: int) -> Any:
    """Return the label of a head with one label per sample."""
    if kind == "regression":
        return float(rng.normal())
    if kind == "multi-label":
        return rng.integers(0, 2, NUM_CLASSES).astype(float).tolist()
    return index % (2 if kind == "next sentence" else NUM_CLASSES)


def _image_sample(rng: np.random.Generator, config: PreTrainedConfig, index: int) -> Sample:
    """Make a sample of random pixels, as large as the config asks for."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", IMAGE_SIZE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pixels = rng.normal(size=(getattr(vision, "num_channels", 3), height, width))
    return {"pixel_values": pixels.astype(np.float32), "labels": index % NUM_CLASSES}


def _more_labels(class_name: str, sample: Sample, rng: np.random.Generator) -> Sample:
    """Return the other labels of pre-training heads."""
    family = class_name.removesuffix("ForPreTraining")
    if family in ("Electra", "Funnel"):
        # Was this token replaced?
        return {"labels": rng.integers(0, 2, len(sample["input_ids"])).tolist()}
    if family == "Albert":
        return {"sentence_order_label": int(rng.integers(2))}
    if family in ("Bert", "BigBird", "Ernie", "FNet", "MegatronBert", "MobileBert"):
        return {"next_sentence_label": int(rng.integers(2))}
    return {}


def _more_inputs(
    class_name: str, sample: Sample, config: PreTrainedConfig, rng: np.random.Generator
) -> Sample:
    """Return additional inputs of single architectures."""
    per_token = sample["labels"] if isinstance(sample.get("labels"), list) else sample["input_ids"]
    size = len(per_token)
    if class_name.startswith("Bros"):
        # A box for every token, as its corners.
        return {"bbox": rng.random((size, 8)).astype(np.float32)}
    if class_name.startswith("Longformer"):
        # Without it, its question answering looks for three separators.
        mask = np.zeros_like(sample["input_ids"])
        mask[..., 0] = 1
        return {"global_attention_mask": mask}
    if class_name == "SplinterForPreTraining":
        # Some questions per sample; 0 pads.
        names = ("question_positions", "start_positions", "end_positions")
        places = rng.integers(1, len(sample["input_ids"]), (len(names), size // 4))
        return dict(zip(names, places.tolist(), strict=True))
    if class_name.startswith("PaliGemma"):
        # Marks prefix and suffix; without it only padded batches are causal.
        return {"token_type_ids": [int(label != IGNORED) for label in sample["labels"]]}
    if class_name.startswith("FSMT"):
        # Without decoder inputs it shifts the source.
        return {"decoder_input_ids": [end_token(config), *sample["labels"][:-1]]}
    if class_name.startswith("Git"):
        # Its loss starts after the image tokens.
        return _image_sample(rng, config, 0) | {"labels": sample["labels"]}
    return {}
