"""Small models of any architecture of transformers, with seeded random weights: one shrinking rule
over config attributes.

Nothing is downloaded and no full-size model is built: the rule finds sizes by the names of a config
class's attributes. `EXCEPTIONS` lists what it cannot derive, with reasons.
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
MOST_PARAMETERS = 6_000_000
LEAST_LAYERS = 2
# A longer list has one entry per layer.
MOST_STAGES = 8
# Required sizes without a default in the class (real checkpoints set them).
NOT_OPEN = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
# Standard deviation of the noise added to every initial weight.
NOISE = 0.05

# (pattern of the attribute's name, largest value of a number, divisor of the numbers in a list).
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
    """Make a config of the class with small sizes. The config class raises its own errors for
    incompatible values.

    Args:
        config_class: The class.
        dropout: The value of every attribute that is a dropout probability. Layer dropout and
            routing noise, which belong to no sample, are always 0.
        overrides: Attributes set last (num_labels, problem_type, ...).

    Example:
        small_config(BertConfig).hidden_size   # 32
    """
    arguments = small_arguments(config_class(), dropout, {})
    if hasattr(config_class, "use_cache"):
        # A cache is for generation.
        arguments["use_cache"] = False
    return config_class(**{**arguments, **overrides})


def small_arguments(
    config: PreTrainedConfig, dropout: float, token_ids: dict[int, int]
) -> dict[str, Any]:
    """Return the arguments for a small version of a config.

    Args:
        config: The config.
        dropout: See `small_config`.
        token_ids: Collects the new ids of special tokens.
    """
    layers = _kept_layers(config)
    defaults = {field.name: field.default for field in fields(config)}
    whole_numbers = {field.name for field in fields(config) if field.type is int}
    arguments: dict[str, Any] = {}
    for name, value in _attributes(config).items():
        own_dropout = 0 if name in whole_numbers else dropout
        small = _small_value(name, value, own_dropout, layers, token_ids)
        if small is None:
            continue
        # Only what differs from the default has to be passed.
        is_default = small is value and value == defaults.get(name, value)
        if not is_default:
            arguments[name] = small
    if layers is not None:
        arguments["num_hidden_layers"] = len(layers)
    key_value_heads = _value(config, "num_key_value_heads")
    if key_value_heads == _value(config, "num_attention_heads"):
        # Without grouped-query attention the two numbers of heads stay equal.
        arguments.pop("num_key_value_heads", None)
        if "num_attention_heads" in arguments and key_value_heads is not None:
            arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    exceptions = EXCEPTIONS.get(type(config).__name__, {})
    return arguments | exceptions


def build_small(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """Build a model in float32 and training mode, without zero weights: its own initialisation plus
    seeded noise.

    Args:
        model_class: The class of the model.
        config: A small config.
        seed: The seed of weights and noise.

    Raises:
        ValueError: If it has more than `MOST_PARAMETERS` parameters: the rule missed a size.
    """
    _check_size(model_class, config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                _make_generic(parameter)
    return model.train()


def switch_off_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities to 0, including those without a config attribute."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def is_dropout(name: str) -> bool:
    """Whether an attribute is a probability to drop elements of a sample, or a whole branch for a
    sample (drop path).
    """
    return "drop" in name and not is_shared_noise(name)


def is_shared_noise(name: str) -> bool:
    """Whether an attribute is the probability of noise that belongs to no single sample: layer
    dropout skips a layer for a whole batch; routing noise and token dropout belong to the routers.
    """
    return bool(re.search(r"layerdrop|jitter|token_dropout|mask_(time|feature)_prob", name))


def _attributes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the declared attributes, and derived lists with one entry per layer."""
    names = sorted(field.name for field in fields(config) if field.init)
    attributes = {name: _value(config, name) for name in names}
    for name, value in vars(config).items():
        is_public = not name.startswith("_")
        if name not in names and is_public and isinstance(value, list):
            attributes[name] = value
    return attributes


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return an attribute; None if it differs between layers."""
    try:
        return getattr(config, name, None)
    except (ValueError, RuntimeError):
        return None


def _small_value(
    name: str, value: Any, dropout: float, layers: list[int] | None, token_ids: dict[int, int]
) -> Any:
    """Return the small value of an attribute.

    Args:
        name: The attribute.
        value: Its value.
        dropout: See `small_config`.
        layers: The layers that are kept. None: the first ones.
        token_ids: Collects the new ids of special tokens.
    """
    if isinstance(value, PreTrainedConfig):
        return {**small_arguments(value, dropout, token_ids), "model_type": value.model_type}
    if value is None:
        return NOT_OPEN.get(name)
    if isinstance(value, bool | str) or name in ("id2label", "label2id"):
        return value
    if is_shared_noise(name) and isinstance(value, int | float):
        return 0.0
    if is_dropout(name) and isinstance(value, int | float):
        return dropout
    if re.search(r"token_id$|token_index$|_token_ids?$", name):
        return _token_ids(value, token_ids)
    if isinstance(value, int):
        return _limited(name, value)
    if isinstance(value, list | tuple):
        return _small_list(name, value, dropout, layers)
    if isinstance(value, dict) and "rope" in name:
        return _small_rotation(value)
    return value


def _small_rotation(value: dict[str, Any]) -> dict[str, Any]:
    """Shrink the sections of a three-axis rotary embedding, possibly nested by kind of layer, to
    fit half a head of size 8.
    """
    small = {k: _small_rotation(v) if isinstance(v, dict) else v for k, v in value.items()}
    if len(value.get("mrope_section", ())) == 3:
        small["mrope_section"] = [2, 1, 1]
    return small


def _size_rule(name: str) -> tuple[int | None, int]:
    """Return limit and divisor of the first pattern of `SIZES` that matches an attribute's name;
    None and 1, if none matches.
    """
    for pattern, limit, divisor in SIZES:
        if re.search(pattern, name):
            return limit, divisor
    return None, 1


def _limited(name: str, value: int) -> int:
    """Return a number, at most the limit for an attribute's name."""
    limit, _ = _size_rule(name)
    return value if limit is None else min(value, limit)


def _small_list(name: str, value: Any, dropout: float, layers: list[int] | None) -> Any:
    """Shrink a list: select the kept layers if it has one entry per layer, else divide its numbers.

    Args:
        name: The attribute.
        value: A list or a tuple.
        dropout: See `small_config`.
        layers: The layers that are kept. None: the config lists no kinds of layers.
    """
    kind = type(value)
    is_per_layer = _is_per_layer(name) or len(value) > MOST_STAGES
    if layers is not None and is_per_layer and len(value) > max(layers):
        kept = [value[layer] for layer in layers]
        return kind(_limited(name, v) if type(v) is int else v for v in kept)
    if is_dropout(name):
        return kind(dropout for _ in value)
    if not all(type(v) is int for v in value):
        return value
    limit, divisor = _size_rule(name)
    if divisor == 1:
        return value
    if limit == LEAST_LAYERS:
        # Numbers of layers, one for each stage.
        return kind(min(v, limit) for v in value)
    return kind(max(v // divisor, 1) for v in value)


def _is_per_layer(name: str) -> bool:
    """Whether an attribute is a list with one entry per layer."""
    return bool(re.search(r"layer|block_type|indexer_types|_per_layer|attn_types", name))


def _kept_layers(config: PreTrainedConfig) -> list[int] | None:
    """Choose the first layer of every kind, at least two layers; None if the config lists no
    kinds.
    """
    count = getattr(config, "num_hidden_layers", None)
    lists = []
    for name, value in _attributes(config).items():
        if not isinstance(value, list | tuple) or len(value) != count:
            continue
        if _is_per_layer(name) and all(isinstance(entry, str | int) for entry in value):
            lists.append(value)
    if not lists or not count:
        return None
    kinds = list(zip(*lists, strict=True))
    firsts = [layer for layer in range(count) if kinds.index(kinds[layer]) == layer][:4]
    if len(firsts) < LEAST_LAYERS:
        return list(range(LEAST_LAYERS))
    return firsts


def _token_ids(value: Any, token_ids: dict[int, int]) -> Any:
    """Choose ids of special tokens: small ids stay, others become the last reserved ones, and equal
    ids stay equal.
    """
    if isinstance(value, list | tuple):
        return type(value)(_token_ids(v, token_ids) for v in value)
    if not isinstance(value, int) or value < NUM_RESERVED // 2:
        return value
    return token_ids.setdefault(value, NUM_RESERVED - 1 - len(token_ids))


def _check_size(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise ValueError if a model has more than `MOST_PARAMETERS` parameters."""
    try:
        with torch.device("meta"):
            model = model_class(config)
            size = sum(p.numel() for p in model.parameters())
    except Exception:
        # It reads its weights in its constructor: rely on the time limit.
        return
    if size > MOST_PARAMETERS:
        raise ValueError(
            f"{model_class.__name__} has {size} parameters after shrinking, more than "
            f"{MOST_PARAMETERS}"
        )


def _make_generic(parameter: nn.Parameter) -> None:
    """Add noise, so that no weight is zero or degenerate; uninitialised weights become noise
    only.
    """
    if parameter.is_floating_point():
        wild = ~parameter.isfinite() | (parameter.abs() > 1e4)
        parameter.masked_fill_(wild, 0.0).add_(torch.randn_like(parameter), alpha=NOISE)
