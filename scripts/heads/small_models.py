"""Build small models of any architecture of transformers, with seeded random weights, by one
shrinking rule over config attributes.

Nothing is downloaded and no full-size model is built: the rule recognises sizes by the names of a
config class's attributes. `EXCEPTIONS` lists the arguments that it cannot derive, with reasons.
"""

import re
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from heads.exceptions import EXCEPTIONS

VOCABULARY = 96
# Ids below are for special tokens, samples use the others.
NUM_RESERVED = 32
MAX_PARAMETERS = 6_000_000
MIN_LAYERS = 2
# A list with more entries has one entry per layer, not per stage.
MAX_STAGES = 8
# Values of required attributes whose default in the config class is None (real checkpoints set
# them).
REQUIRED_SIZES = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
# Standard deviation of the noise added to every initial weight.
NOISE = 0.05

# (pattern of the attribute's name, maximum of a number, divisor of the numbers in a list).
# The first match applies.
SIZES: list[tuple[str, int, int]] = [
    (r"kernel|stride", 1 << 60, 1),  # unchanged: they must fit the paddings
    (r"vocab", VOCABULARY, 1),
    (
        r"position_emb|n_positions|max_seq|seq_len|n_ctx|max_(source|target)|max_length|context_length",
        64,
        1,
    ),
    (r"sliding_window$|window_size|attention_window$|attention_chunk_size|local_attention", 8, 1),
    (r"image_size|input_size|crop_size", 32, 1),
    (r"period|interval|frequency|every_n|_step$|sparse_step", 2, 1),
    (r"layer_offset|first_k_dense|num_dense_layers|dense_layers", 1, 1),
    (r"mtp|nextn_predict|kv_shared_layers", 0, 1),
    (r"per_tok|top_?k$|moe_k$", 2, 1),
    (r"n_groups?$|ngroups|topk_group|expert_group", 1, 1),
    (r"shared_experts$", 1, 1),
    (r"experts$|num_expert", 4, 1),
    (r"(key_value|kv).*heads|kv_n_heads", 2, 1),
    (r"rope_head_dim|rotary_dim", 4, 1),
    (r"qk_head_dim", 12, 1),  # rotated and unrotated parts together
    (r"expand$", 1, 1),  # state space model: makes its heads x head size equal to its attention's
    (r"head_?dim|dim_head|d_head|d_kv|kv_channels|head_size", 8, 1),
    # Few heads have index scores of exactly 0, and top-k breaks ties by batch width.
    (r"index_n_heads", 32, 1),
    (r"heads?(_per_layer)?$", 4, 1),
    (r"layers?$|depths?$|blocks?$|layers?_per_|n_stage", 2, 4),
    (r"rank|state_size|d_state", 8, 1),
    (r"d_ssm", 32, 1),
    (r"chunk_size$|chunk_length", 8, 1),
    (
        r"intermediate|ffn|d_ff|d_inner|dff|mlp_dim|inner_dim|feed_forward|hidden_dim$|n_inner",
        48,
        4,
    ),
    (
        r"hidden_size|d_model|n_embd|embed|emb_|_dim$|^dim|width|output_dim|projection|latents$|channels$|size$|filters",
        32,
        4,
    ),
]


def small_config(
    config_class: type[PreTrainedConfig], dropout: float = 0.0, **overrides: Any
) -> PreTrainedConfig:
    """Build a config of a transformers architecture with small sizes, for the sweep over all
    architectures. The config class raises its own errors for incompatible values.

    Args:
        config_class: The config class.
        dropout: Value of all dropout probabilities. Layer dropout and routing noise, which cannot
            be tied to a sample, are always 0.
        overrides: Config arguments that replace those of the rule (num_labels, ...).

    Example:
        small_config(BertConfig).hidden_size   # 32
    """
    arguments = small_arguments(config_class(), dropout, {})
    if hasattr(config_class, "use_cache"):
        # The key-value cache is for generation only.
        arguments["use_cache"] = False
    return config_class(**{**arguments, **overrides})


def small_arguments(
    config: PreTrainedConfig, dropout: float, token_ids: dict[int, int]
) -> dict[str, Any]:
    """Return the arguments with which a config class of transformers builds a small version of a
    config, for the sweep over all architectures.

    Args:
        config: The config of full size.
        dropout: Value of all dropout probabilities.
        token_ids: Maps ids of special tokens to their new ids; new ones are added, in place.
    """
    layers = _representative_layers(config)
    defaults = {field.name: field.default for field in fields(config)}
    integer_names = {field.name for field in fields(config) if field.type is int}
    arguments: dict[str, Any] = {}
    for name, value in _size_attributes(config).items():
        # An integer attribute cannot hold the probability.
        attribute_dropout = 0 if name in integer_names else dropout
        small = _small_value(name, value, attribute_dropout, layers, token_ids)
        if small is None:
            continue
        # Values that stay at the default need not be passed.
        is_default = small is value and value == defaults.get(name, value)
        if not is_default:
            arguments[name] = small
    if layers is not None:
        arguments["num_hidden_layers"] = len(layers)
    num_kv_heads = _get_attribute(config, "num_key_value_heads")
    if num_kv_heads == _get_attribute(config, "num_attention_heads"):
        # Without grouped-query attention the two numbers of heads stay equal.
        arguments.pop("num_key_value_heads", None)
        if "num_attention_heads" in arguments and num_kv_heads is not None:
            arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    exceptions = EXCEPTIONS.get(type(config).__name__, {})
    return arguments | exceptions


def build_small(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """Build a small model for the sweep over transformers' architectures, in float32 and training
    mode. Its weights are its own initialisation plus noise, so that none is zero. torch's global
    generator is not changed.

    Args:
        model_class: The model class of transformers.
        config: A small config (`small_config`).
        seed: Seed of weights and noise.

    Raises:
        ValueError: If the model has more than `MAX_PARAMETERS` parameters, because the shrinking
            rule missed a size.
    """
    _check_size(model_class, config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                _add_noise_(parameter)
    return model.train()


def switch_off_dropout(model: nn.Module) -> None:
    """Set the probability of all dropout modules to 0, in place, including those without a config
    attribute.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def is_dropout(name: str) -> bool:
    """Whether a config attribute is a dropout probability, of elements or of a residual branch of a
    single sample (drop path), by its name.
    """
    return "drop" in name and not is_shared_noise(name)


def is_shared_noise(name: str) -> bool:
    """Whether a config attribute is the probability of noise that cannot be tied to a sample, by
    its name: dropout of whole layers, routing noise, token dropout of routers, masking of input
    features.
    """
    return bool(re.search(r"layerdrop|jitter|token_dropout|mask_(time|feature)_prob", name))


def _size_attributes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the attributes of a config that a small version may change, by name: the arguments of
    its class, and all other public lists, which have one entry per layer.
    """
    names = sorted(field.name for field in fields(config) if field.init)
    attributes = {name: _get_attribute(config, name) for name in names}
    for name, value in vars(config).items():
        is_public = not name.startswith("_")
        if name not in names and is_public and isinstance(value, list):
            attributes[name] = value
    return attributes


def _get_attribute(config: PreTrainedConfig, name: str) -> Any:
    """Return an attribute of a config, or None if it has none with this name, or raises because the
    value differs between layers.
    """
    try:
        return getattr(config, name, None)
    except (ValueError, RuntimeError):
        return None


def _small_value(
    name: str, value: Any, dropout: float, layers: list[int] | None, token_ids: dict[int, int]
) -> Any:
    """Return the small value of a config attribute by its name and type: the value itself if the
    rule does not change it. `layers` are the layers to keep; None: the first ones.
    """
    if isinstance(value, PreTrainedConfig):
        return {**small_arguments(value, dropout, token_ids), "model_type": value.model_type}
    if value is None:
        return REQUIRED_SIZES.get(name)
    if isinstance(value, bool | str) or name in ("id2label", "label2id"):
        return value
    if is_shared_noise(name) and isinstance(value, int | float):
        return 0.0
    if is_dropout(name) and isinstance(value, int | float):
        return dropout
    if re.search(r"token_id$|token_index$|_token_ids?$", name):
        return _small_token_ids(value, token_ids)
    if isinstance(value, int):
        return _limit_size(name, value)
    if isinstance(value, list | tuple):
        return _small_list(name, value, dropout, layers)
    return value


def _size_rule(name: str) -> tuple[int | None, int]:
    """Return the maximum of a number (None: it is not a size) and the divisor of numbers in a list,
    by the first pattern of `SIZES` that matches the attribute's name.
    """
    for pattern, limit, divisor in SIZES:
        if re.search(pattern, name):
            return limit, divisor
    return None, 1


def _limit_size(name: str, value: int) -> int:
    """Return the value of an integer config attribute, but at most the maximum that `SIZES` has for
    its name.
    """
    limit, _ = _size_rule(name)
    return value if limit is None else min(value, limit)


def _small_list(name: str, value: Any, dropout: float, layers: list[int] | None) -> Any:
    """Return a list attribute for a small version of a config: the layers to keep of a list by
    layer; in a list by stage, probabilities are replaced, layers limited, sizes divided.
    """
    sequence_type = type(value)
    is_per_layer = _is_per_layer(name) or len(value) > MAX_STAGES
    if layers is not None and is_per_layer and len(value) > max(layers):
        kept = [value[layer] for layer in layers]
        return sequence_type(
            _limit_size(name, entry) if type(entry) is int else entry for entry in kept
        )
    if is_dropout(name):
        return sequence_type(dropout for _ in value)
    if not all(type(entry) is int for entry in value):
        return value
    limit, divisor = _size_rule(name)
    if divisor == 1:
        return value
    counts_layers = limit == MIN_LAYERS
    if counts_layers:
        return sequence_type(min(entry, limit) for entry in value)
    return sequence_type(max(entry // divisor, 1) for entry in value)


def _is_per_layer(name: str) -> bool:
    """Whether a config attribute is a list with one entry per layer, by its name."""
    return bool(re.search(r"layer|block_type|indexer_types|_per_layer|attn_types", name))


def _representative_layers(config: PreTrainedConfig) -> list[int] | None:
    """Choose the layers to keep: the first one of each kind, at most four, or the first two if all
    have the same kind. None: the config does not list kinds of layers.
    """
    num_layers = getattr(config, "num_hidden_layers", None)
    lists = []
    for name, value in _size_attributes(config).items():
        if not isinstance(value, list | tuple) or len(value) != num_layers:
            continue
        if _is_per_layer(name):
            lists.append(value)
    if not lists or not num_layers:
        return None
    # Layers are of the same kind if all lists have the same entries for them.
    kinds = list(zip(*lists, strict=True))
    first_of_kind = [layer for layer in range(num_layers) if kinds.index(kinds[layer]) == layer]
    chosen = first_of_kind[:4]
    if len(chosen) < MIN_LAYERS:
        return list(range(MIN_LAYERS))
    return chosen


def _small_token_ids(value: Any, token_ids: dict[int, int]) -> Any:
    """Return new ids for special tokens, below `NUM_RESERVED`: small ids stay, large ones get the
    last reserved ids, and equal ids stay equal. New ones are added to `token_ids`, in place.
    """
    if isinstance(value, list | tuple):
        return type(value)(_small_token_ids(token_id, token_ids) for token_id in value)
    if not isinstance(value, int) or value < NUM_RESERVED // 2:
        return value
    return token_ids.setdefault(value, NUM_RESERVED - 1 - len(token_ids))


def _check_size(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise ValueError if a model has more than `MAX_PARAMETERS` parameters; it is built on the
    meta device. Do nothing if it cannot be built there.
    """
    try:
        with torch.device("meta"):
            model = model_class(config)
            num_parameters = sum(p.numel() for p in model.parameters())
    except Exception:
        # The constructor reads values of weights. The sweep's time limit ends a model that is too
        # large.
        return
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(
            f"{model_class.__name__} has {num_parameters} parameters after shrinking, more than "
            f"{MAX_PARAMETERS}"
        )


def _add_noise_(parameter: nn.Parameter) -> None:
    """Add normal noise to a parameter, in place, so that no weight is zero and all are different;
    uninitialised elements (not finite, or above 1e4) become noise only.
    """
    if parameter.is_floating_point():
        uninitialised = ~parameter.isfinite() | (parameter.abs() > 1e4)
        parameter.masked_fill_(uninitialised, 0.0).add_(torch.randn_like(parameter), alpha=NOISE)
