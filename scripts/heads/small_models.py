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
NUM_RESERVED = 32  # ids below are for special tokens, samples use the others
MOST_PARAMETERS = 6_000_000
LEAST_LAYERS, MOST_STAGES = 2, 8  # a longer list has one entry per layer
# Required sizes without a default in the class (real checkpoints set them).
NOT_OPEN = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
NOISE = 0.05  # standard deviation of the noise added to every initial weight

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
    (
        r"index_n_heads",
        32,
        1,
    ),  # few heads have index scores of exactly 0, and top-k breaks ties by batch width
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
    """A config of the class with small sizes.

    Args:
        dropout: the value of every attribute that is a dropout probability. Layer dropout and
            routing noise, which belong to no sample, are always 0.
        overrides: attributes set last (num_labels, problem_type, ...).

    Raises:
        errors of the config class for incompatible values.

    Example:
        small_config(BertConfig).hidden_size   # 32
    """
    arguments = small_arguments(config_class(), dropout, {})
    if hasattr(config_class, "use_cache"):
        arguments["use_cache"] = False  # a cache is for generation
    return config_class(**{**arguments, **overrides})


def small_arguments(
    config: PreTrainedConfig, dropout: float, token_ids: dict[int, int]
) -> dict[str, Any]:
    """Arguments for a small version of `config`. `token_ids` collects new ids of special tokens."""
    layers = _kept_layers(config)
    defaults = {field.name: field.default for field in fields(config)}
    whole_numbers = {field.name for field in fields(config) if field.type is int}
    arguments: dict[str, Any] = {}
    for name, value in _attributes(config).items():
        small = _small_value(
            name, value, 0 if name in whole_numbers else dropout, layers, token_ids
        )
        if small is not None and (small is not value or value != defaults.get(name, value)):
            arguments[name] = small
    if layers is not None:
        arguments["num_hidden_layers"] = len(layers)
    if _value(config, "num_key_value_heads") == _value(
        config, "num_attention_heads"
    ):  # not grouped-query attention
        arguments.pop("num_key_value_heads", None)
        if "num_attention_heads" in arguments and _value(config, "num_key_value_heads") is not None:
            arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    arguments.update(EXCEPTIONS.get(type(config).__name__, {}))
    return arguments


def build_small(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """The model in float32 and training mode, without zero weights: its own initialisation plus
    seeded noise.

    Raises:
        ValueError: it has more than `MOST_PARAMETERS` parameters: the rule missed a size.
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
    """Layer dropout skips a layer for a whole batch; routing noise and token dropout belong to the
    routers.
    """
    return bool(re.search(r"layerdrop|jitter|token_dropout|mask_(time|feature)_prob", name))


def _attributes(config: PreTrainedConfig) -> dict[str, Any]:
    """Declared attributes, and derived lists with one entry per layer."""
    known = {
        name: _value(config, name)
        for name in sorted(field.name for field in fields(config) if field.init)
    }
    derived = {
        n: v
        for n, v in vars(config).items()
        if n not in known and not n.startswith("_") and isinstance(v, list)
    }
    return {**known, **derived}


def _value(config: PreTrainedConfig, name: str) -> Any:
    """The attribute; None if it differs between layers."""
    try:
        return getattr(config, name, None)
    except (ValueError, RuntimeError):
        return None


def _small_value(
    name: str, value: Any, dropout: float, layers: list[int] | None, token_ids: dict[int, int]
) -> Any:
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
    """The sections of a three-axis rotary embedding, possibly nested by kind of layer, that fit
    half a head of size 8.
    """
    small = {k: _small_rotation(v) if isinstance(v, dict) else v for k, v in value.items()}
    return (
        {**small, "mrope_section": [2, 1, 1]} if len(value.get("mrope_section", ())) == 3 else small
    )


def _limited(name: str, value: int) -> int:
    limit = next((limit for pattern, limit, _ in SIZES if re.search(pattern, name)), value)
    return min(value, limit)


def _small_list(name: str, value: Any, dropout: float, layers: list[int] | None) -> Any:
    """For a list with one entry per layer, select the kept layers; divide the numbers of other
    lists.
    """
    kind = type(value)
    if (
        layers is not None
        and len(value) > max(layers)
        and (_is_per_layer(name) or len(value) > MOST_STAGES)
    ):
        return kind(_limited(name, value[i]) if type(value[i]) is int else value[i] for i in layers)
    if is_dropout(name):
        return kind(dropout for _ in value)
    if not all(type(v) is int for v in value):
        return value
    limit, divisor = next(
        ((limit, divisor) for pattern, limit, divisor in SIZES if re.search(pattern, name)),
        (None, 1),
    )
    if divisor == 1:
        return value
    return kind(min(v, limit) if limit == LEAST_LAYERS else max(v // divisor, 1) for v in value)


def _is_per_layer(name: str) -> bool:
    return bool(re.search(r"layer|block_type|indexer_types|_per_layer|attn_types", name))


def _kept_layers(config: PreTrainedConfig) -> list[int] | None:
    """The first layer of every kind, at least two layers; None if the config lists no kinds."""
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        v
        for n, v in _attributes(config).items()
        if isinstance(v, list | tuple)
        and len(v) == count
        and _is_per_layer(n)
        and all(isinstance(x, str | int) for x in v)
    ]
    if not lists or not count:
        return None
    kinds = list(zip(*lists, strict=True))
    firsts = [layer for layer in range(count) if kinds.index(kinds[layer]) == layer][:4]
    return firsts if len(firsts) >= LEAST_LAYERS else list(range(LEAST_LAYERS))


def _token_ids(value: Any, token_ids: dict[int, int]) -> Any:
    """Special tokens keep small ids; others receive the last reserved ones; equal ids stay
    equal.
    """
    if isinstance(value, list | tuple):
        return type(value)(_token_ids(v, token_ids) for v in value)
    if not isinstance(value, int) or value < NUM_RESERVED // 2:
        return value
    return token_ids.setdefault(value, NUM_RESERVED - 1 - len(token_ids))


def _check_size(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
    except Exception:  # it reads its weights in its constructor: rely on the time limit
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
