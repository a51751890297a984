"""Samples of different lengths for every kind of head (a model class of transformers with a loss),
and a plain collate function that pads. Independent of hf_ga.

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
# Ordinary tokens have ids from FIRST_ID to END_ID - 1; lower ids are special tokens.
FIRST_ID = 32
END_ID = 96
LENGTHS = (5, 21, 12, 4, 17, 9, 20, 6)
IMAGE_SIZE = 32
# Question answering: indices of the samples whose answer starts or ends behind the truncated text.
# Their position is `BEYOND`, and the head ignores these targets.
TRUNCATED_STARTS = (1, 6)
TRUNCATED_ENDS = (1, 2, 6)
BEYOND = 1000
# Architectures that need a fixed padded length: the longest sample, rounded up to the size of their
# chunks or tables.
PADDED_LENGTHS = {"reformer": 24, "nystromformer": 24, "perceiver": 64}

# Kind of head -> config arguments.
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
    """Draw 8 random samples with labels for a head (a model class of transformers with a loss).

    Args:
        kind: The kind of loss, a key of `KINDS`.
        class_name: Name of the model class; some have more labels or inputs.
        config: The config of the small model.
        seed: Seed of the samples.

    Returns:
        The samples, dicts of lists and numbers, before padding.
    """
    rng = np.random.default_rng(seed)
    if kind == "image classification" and class_name.startswith("ImageGPT"):
        # ImageGPT's pixels are tokens.
        return [
            {"input_ids": rng.integers(0, FIRST_ID, 16).tolist(), "labels": i % NUM_CLASSES}
            for i in range(len(LENGTHS))
        ]
    if kind == "image classification":
        return [_image_sample(rng, config, i) for i in range(len(LENGTHS))]
    if kind == "seq2seq" and not config.is_encoder_decoder:
        # The class is a decoder that continues after its audio or image input.
        kind = "causal LM"
    vocab_size = getattr(config.get_text_config(), "vocab_size", None) or END_ID
    end_id = min(END_ID, vocab_size)
    eos_token_id = end_token(config)
    texts = [rng.integers(FIRST_ID, end_id, length).tolist() for length in LENGTHS]
    if eos_token_id is not None:
        for input_ids in texts:
            input_ids[-1] = eos_token_id
    # In sequence-to-sequence models each text generates another one.
    target_texts = reversed(texts)
    samples = [
        _make_sample(kind, input_ids, target_ids, rng, index)
        for index, (input_ids, target_ids) in enumerate(zip(texts, target_texts, strict=True))
    ]
    return [
        {
            **sample,
            **_pretraining_labels(class_name, sample, rng),
            **_architecture_inputs(class_name, sample, config, rng),
        }
        for sample in samples
    ]


def end_token(config: PreTrainedConfig) -> int | None:
    """Return the config's end-of-sequence id, with which samples end (BART's classifier looks for
    it); None if there is none, or it is also the padding id.
    """
    text_config = config.get_text_config()
    eos_token_id = getattr(text_config, "eos_token_id", None)
    if isinstance(eos_token_id, list | tuple):
        eos_token_id = eos_token_id[0]
    if not isinstance(eos_token_id, int) or eos_token_id < 0:
        return None
    if eos_token_id == getattr(text_config, "pad_token_id", None):
        return None
    return eos_token_id


class PaddingCollator:
    """Collate function that right-pads each list of the samples to the longest one in the batch:
    token ids with the padding id, labels with -100, other inputs with 0.

    Args:
        pad_id: The padding id.
        min_length: Pad token lists to at least this many tokens.
    """

    def __init__(self, pad_id: int, min_length: int = 0) -> None:
        self.pad_id = pad_id
        self.min_length = min_length

    def __call__(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Collate samples into a batch of tensors: float32, or int64 for integers."""
        return {
            name: self._pad_and_stack(name, [sample[name] for sample in samples])
            for name in samples[0]
        }

    def _pad_and_stack(self, name: str, values: list[Any]) -> Tensor:
        """Pad the values of a model input in all dims to their largest sizes, and stack them."""
        pad_value = 0
        if "labels" in name:
            pad_value = IGNORED
        elif name.endswith("input_ids"):
            pad_value = self.pad_id
        arrays = [np.asarray(value) for value in values]
        dtype = arrays[0].dtype
        shape = np.max([array.shape for array in arrays], axis=0).astype(int)
        are_tokens = len(shape) > 0 and dtype.kind == "i"
        if self.min_length and are_tokens:
            shape[-1] = max(self.min_length, shape[-1])
        padded = np.full((len(arrays), *shape), pad_value, dtype=dtype)
        for row, array in enumerate(arrays):
            unpadded = tuple(slice(size) for size in array.shape)
            padded[(row, *unpadded)] = array
        tensor = torch.from_numpy(padded)
        return tensor.float() if tensor.is_floating_point() else tensor.long()


def _make_sample(
    kind: str, input_ids: list[int], target_ids: list[int], rng: np.random.Generator, index: int
) -> Sample:
    """Make sample number `index` of a text, with the labels of a kind of head: the model's
    arguments before padding. `target_ids` is the text that a seq2seq model generates.
    """
    sample: Sample = {"input_ids": input_ids, "attention_mask": [1] * len(input_ids)}
    if kind.startswith("causal LM"):
        num_ignored = 2 if index % 2 else 0
        return {**sample, "labels": [IGNORED] * num_ignored + input_ids[num_ignored:]}
    if kind in ("masked LM", "pre-training"):
        return {**sample, "labels": _ignore_some(input_ids, rng)}
    if kind == "token classification":
        classes = [token_id % NUM_CLASSES for token_id in input_ids]
        return {**sample, "labels": _ignore_some(classes, rng)}
    if kind == "seq2seq":
        return {**sample, "labels": target_ids}
    if kind == "question answering":
        start, end = sorted(rng.integers(0, len(input_ids), 2).tolist())
        if index in TRUNCATED_STARTS:
            start = BEYOND
        if index in TRUNCATED_ENDS:
            end = BEYOND
        return {**sample, "start_positions": start, "end_positions": end}
    if kind == "multiple choice":
        choices = [input_ids]
        for _ in range(NUM_CHOICES - 1):
            other_ids = rng.integers(FIRST_ID, max(input_ids) + 1, len(input_ids) - 1)
            choices.append([*other_ids.tolist(), input_ids[-1]])
        return {
            "input_ids": choices,
            "attention_mask": [[1] * len(input_ids)] * NUM_CHOICES,
            "labels": index % NUM_CHOICES,
        }
    if kind == "regression":
        return {**sample, "labels": float(rng.normal())}
    if kind == "multi-label":
        return {**sample, "labels": rng.integers(0, 2, NUM_CLASSES).astype(float).tolist()}
    return {**sample, "labels": index % (2 if kind == "next sentence" else NUM_CLASSES)}


def _ignore_some(labels: list[int], rng: np.random.Generator) -> list[int]:
    """Replace about half of a short sample's labels by -100, and 70 % or none of a long one's, so
    that numbers of targets are very different. The second label stays: each has a target.
    """
    ignored_share = 0.5
    if len(labels) > LENGTHS[0]:
        ignored_share = 0.7 if rng.integers(2) else 0.0
    result = []
    for position, label in enumerate(labels):
        is_kept = position == 1 or rng.random() >= ignored_share
        result.append(label if is_kept else IGNORED)
    return result


def _image_sample(rng: np.random.Generator, config: PreTrainedConfig, index: int) -> Sample:
    """Make a sample of random pixels, float32 of shape (channels, height, width) as in the config,
    with a class as its label.
    """
    vision_config = getattr(config, "vision_config", config)
    size = getattr(vision_config, "image_size", IMAGE_SIZE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pixels = rng.normal(size=(getattr(vision_config, "num_channels", 3), height, width))
    return {"pixel_values": pixels.astype(np.float32), "labels": index % NUM_CLASSES}


def _pretraining_labels(class_name: str, sample: Sample, rng: np.random.Generator) -> Sample:
    """Return the additional or different labels that some pre-training classes need; an empty dict
    for other classes.
    """
    family = class_name.removesuffix("ForPreTraining")
    if family in ("Electra", "Funnel"):
        # Whether each token was replaced.
        return {"labels": rng.integers(0, 2, len(sample["input_ids"])).tolist()}
    if family == "Albert":
        return {"sentence_order_label": int(rng.integers(2))}
    if family in ("Bert", "BigBird", "Ernie", "FNet", "MegatronBert", "MobileBert"):
        return {"next_sentence_label": int(rng.integers(2))}
    return {}


def _architecture_inputs(
    class_name: str, sample: Sample, config: PreTrainedConfig, rng: np.random.Generator
) -> Sample:
    """Return the additional model arguments that single architectures need; an empty dict for
    others.
    """
    per_token = sample["labels"] if isinstance(sample.get("labels"), list) else sample["input_ids"]
    num_tokens = len(per_token)
    if class_name.startswith("Bros"):
        # The bounding box of each token, as the coordinates of its four corners.
        return {"bbox": rng.random((num_tokens, 8)).astype(np.float32)}
    if class_name.startswith("Longformer"):
        # Without this mask, its question answering raises unless a text has three separators.
        mask = np.zeros_like(sample["input_ids"])
        mask[..., 0] = 1
        return {"global_attention_mask": mask}
    if class_name == "SplinterForPreTraining":
        # Several questions for each sample; 0 is padding.
        names = ("question_positions", "start_positions", "end_positions")
        positions = rng.integers(1, len(sample["input_ids"]), (len(names), num_tokens // 4))
        return dict(zip(names, positions.tolist(), strict=True))
    if class_name.startswith("PaliGemma"):
        # Marks prefix (0) and suffix (1); without it only padded batches are causal.
        return {"token_type_ids": [int(label != IGNORED) for label in sample["labels"]]}
    if class_name.startswith("FSMT"):
        # Without decoder inputs FSMT would shift the source text.
        return {"decoder_input_ids": [end_token(config), *sample["labels"][:-1]]}
    if class_name.startswith("Git"):
        # GIT's loss starts after the image tokens, so it needs an image.
        return _image_sample(rng, config, 0) | {"labels": sample["labels"]}
    return {}
