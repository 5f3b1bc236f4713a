"""Shapes of published models, to plan memory before anything is downloaded.

The loader reads config.json and never these. The numbers come from the configurations of checkpoints derived from the
published ones (0.8B, 4B, 9B) and from model cards. Not seen in a config.json: ``intermediate_size`` of 2B, which is
what its 1.88 B parameters leave, and that 2B and 4B tie the embedding.
"""

from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config


def _qwen35(hidden: int, intermediate: int, layers: int, heads: int, kv: int, values: int, tied: bool) -> Qwen35Config:
    return Qwen35Config(
        model_type="qwen3_5",
        vocab_size=248320,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv,
        head_dim=256,
        max_positions=262144,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        rms_eps=1e-6,
        tie_embeddings=tied,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * (layers // 4),
        linear_key_heads=16,
        linear_value_heads=values,
        linear_key_dim=128,
        linear_value_dim=128,
        conv_kernel=4,
        mrope_section=(11, 11, 10),
    )


SHAPES: dict[str, Qwen35Config] = {
    "qwen3.5-0.8b": _qwen35(1024, 3584, 24, 8, 2, 16, True),
    "qwen3.5-2b": _qwen35(2048, 6144, 24, 8, 2, 16, True),
    "qwen3.5-4b": _qwen35(2560, 9216, 32, 16, 4, 32, True),
    "qwen3.5-9b": _qwen35(4096, 12288, 32, 16, 4, 32, False),
}
