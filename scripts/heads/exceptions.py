"""Config arguments of single architectures for which the shrinking rule of `small_models.py` fails,
each with its reason.
"""

from typing import Any

# Name of a config class -> arguments that replace those of the rule.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # Axial position embeddings: the product of the shape is the only sequence length in training,
    # and the embedding dims sum to the hidden size.
    "ReformerConfig": {"axial_pos_shape": (4, 6), "axial_pos_embds_dim": (8, 24)},
    # One layer of each kind: the class has no default list of kinds, or one whose pattern is longer
    # than two layers.
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "ZambaConfig": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 64,  # twice the hidden size: attention concatenates two inputs
        "attention_head_dim": 16,
    },
    "Zamba2Config": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "hybrid_layer_ids": [1, 2],
    },
    # The head dim of layers with global attention is not a declared attribute.
    "Gemma4TextConfig": {"global_head_dim": 8},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 8},
    # The model reads attributes that the config class does not declare.
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    # The default rotary parameters do not fit the default kinds of layers.
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    # Its head dim is that of the rotated part only.
    "LongcatFlashConfig": {"head_dim": 4},
    # A quarter of the head is rotated, as pairs in two position dims. Its sliding window differs
    # from layer to layer.
    "NeoMMEConfig": {"head_dim": 16, "sliding_window": 4},
    # The rotary embedding assumes that half of each head is rotated.
    "Mistral4Config": {"qk_nope_head_dim": 4},
    # The embeddings of a box's four coordinates, width and height are concatenated to the hidden
    # size.
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "LiltConfig": {"hidden_size": 48},
    # The padding ids of XPath tags and subscripts are fixed row numbers of these embeddings.
    "MarkupLMConfig": {
        "max_xpath_tag_unit_embeddings": 256,
        "max_xpath_subs_unit_embeddings": 1024,
    },
    # The model selects an adapter by language.
    "XmodConfig": {"default_language": "en_XX"},
    # The model raises an error for attention dropout.
    "DiffLlamaConfig": {"attention_dropout": 0.0},
    # With fewer landmarks than tokens the model does not support an attention mask; by default the
    # numbers are equal.
    "NystromformerConfig": {"segment_means_seq_len": 24, "num_landmarks": 24},
    # The position embedding has a 32nd of the hidden size, for a sine and a cosine.
    "BrosConfig": {"hidden_size": 64},
    # The classification token is added in the fourth stage.
    "PvtConfig": {"num_encoder_blocks": 4},
    # The sizes of the sparse attention's indexer have no defaults.
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    # The attention window must divide the grid of patches, and each stage's number of heads its
    # hidden size.
    "SwinConfig": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
    "Swinv2Config": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
    "DonutSwinConfig": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
}
