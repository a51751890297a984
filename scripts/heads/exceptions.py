"""Exceptions of single architectures from the shrinking rule of `small_models.py`, each with its
reason.
"""

from typing import Any

# name of a config class -> its arguments
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # The axes of its positions multiply to its only training length, and their widths sum to the
    # hidden size.
    "ReformerConfig": {"axial_pos_shape": (4, 6), "axial_pos_embds_dim": (8, 24)},
    # One layer of each kind: the class has no default for the kinds, or a pattern of more than two
    # layers.
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "ZambaConfig": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 64,  # twice the hidden size: its attention reads two streams
        "attention_head_dim": 16,
    },
    "Zamba2Config": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "hybrid_layer_ids": [1, 2],
    },
    # Some of their layers have sizes without an attribute.
    "Gemma4TextConfig": {"global_head_dim": 8},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 8},
    # An attribute that its model reads and its class does not declare.
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    # Rotary embedding by kind of layer: no default fits the default kinds.
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    # Its head size is that of the rotated part only.
    "LongcatFlashConfig": {"head_dim": 4},
    # A quarter of the head is rotated, in two axes of pairs. Its window differs from layer to
    # layer.
    "NeoMMEConfig": {"head_dim": 16, "sliding_window": 4},
    # Half of each head is rotated, as its rotary embedding derives itself.
    "Mistral4Config": {"qk_nope_head_dim": 4},
    # Four coordinates and two shapes of a box, embedded side by side, make the hidden size.
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "LiltConfig": {"hidden_size": 48},
    # The padding ids of paths have fixed rows in these tables.
    "MarkupLMConfig": {
        "max_xpath_tag_unit_embeddings": 256,
        "max_xpath_subs_unit_embeddings": 1024,
    },
    # It selects the adapter by language.
    "XmodConfig": {"default_language": "en_XX"},
    # It raises an error for attention dropout.
    "DiffLlamaConfig": {"attention_dropout": 0.0},
    # With fewer landmarks than tokens it does not support a mask; the default is equal numbers.
    "NystromformerConfig": {"segment_means_seq_len": 24, "num_landmarks": 24},
    # A 32nd of the hidden size must fit a sine and a cosine.
    "BrosConfig": {"hidden_size": 64},
    # The classification token is added in the last of its four stages.
    "PvtConfig": {"num_encoder_blocks": 4},
    # An indexer without default sizes.
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    # Windows must divide the grid, and each stage's heads must divide its width.
    "SwinConfig": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
    "Swinv2Config": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
    "DonutSwinConfig": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
}
