"""What the shrinking rule of `small_models.py` cannot know of single architectures, each with its reason."""

from typing import Any

# name of a config class -> its arguments
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # The axes of its positions multiply to the one length that it trains on, and their widths sum to the hidden size.
    "ReformerConfig": {"axial_pos_shape": (4, 6), "axial_pos_embds_dim": (8, 24)},
    # One layer of each kind: the class has no default for the kinds, or a pattern that needs more layers than two.
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
    # The sizes of some of their layers go through no attribute.
    "Gemma4TextConfig": {"global_head_dim": 8},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 8},
    # An attribute that its model reads and its class does not declare.
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    # Rotation by kind of layer: no default fits the default kinds.
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
    },
    # Its head size is that of the rotated part alone.
    "LongcatFlashConfig": {"head_dim": 4},
    # A quarter of the head is rotated, in two axes of pairs. Its window differs from layer to layer.
    "NeoMMEConfig": {"head_dim": 16, "sliding_window": 4},
    # Half of each head is rotated, as its rotation says by itself.
    "Mistral4Config": {"qk_nope_head_dim": 4},
    # Four coordinates and two shapes of a box, embedded side by side, make the hidden size.
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "LiltConfig": {"hidden_size": 48},
    # The ids for padding in paths have fixed places in these tables.
    "MarkupLMConfig": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024},
    # Without a language it does not know which adapter to use.
    "XmodConfig": {"default_language": "en_XX"},
    # It refuses attention dropout by name.
    "DiffLlamaConfig": {"attention_dropout": 0.0},
    # With fewer landmarks than tokens it cannot take a mask; as many is its default.
    "NystromformerConfig": {"segment_means_seq_len": 24, "num_landmarks": 24},
    # A 32nd of the hidden size must hold a sine and a cosine.
    "BrosConfig": {"hidden_size": 64},
    # The classification token comes in the last of its four stages.
    "PvtConfig": {"num_encoder_blocks": 4},
    # An indexer whose sizes the class leaves open.
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    # Windows must divide the grid, and each stage's heads its width.
    "SwinConfig": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
    "Swinv2Config": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
    "DonutSwinConfig": {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4},
}
