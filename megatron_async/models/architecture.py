"""What a model *is*, apart from its weights: one small record that every loader produces.

`ModelArchitecture` imports neither torch nor Megatron, so `megatron-async info` and the checkpoint
readers can use it cheaply. `models/hybrid.py` turns it into a Megatron-Core model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling ("llama3" in Hugging Face's `rope_scaling`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelArchitecture:
    """Shape and conventions of a dense decoder-only transformer.

    All sizes are counts of elements; `kv_channels` is the size of one attention head.
    """

    model_type: str
    """Hugging Face family name: "llama", "mistral", "qwen2" or "qwen3"."""
    num_layers: int
    """Transformer layers (each one attention and one MLP)."""
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (grouped-query attention)."""
    kv_channels: int
    """Dimension of one head."""
    ffn_hidden_size: int
    vocab_size: int
    """Rows of the embedding matrix."""
    layernorm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    add_qkv_bias: bool = False
    """Biases on the q, k and v projections (Qwen2)."""
    qk_layernorm: bool = False
    """RMSNorm on each query and key head before rope (Qwen3)."""
    tie_word_embeddings: bool = False
    """The output projection is the embedding matrix."""
    max_position_embeddings: int = 2048
    """Longest sequence that the model was trained for, tokens."""
    sliding_window: int | None = None
    """Attention window in tokens, None for full attention. The engine runs full attention, so it
    serves such a model up to this length only."""
    eos_token_ids: tuple[int, ...] = field(default=())
    """Tokens that end a generation, the tokenizer's own first; may be empty."""
    bos_token_id: int | None = None

    @property
    def hybrid_layer_pattern(self) -> str:
        """Megatron's layer pattern: attention (`*`) and MLP (`-`) alternate."""
        return "*-" * self.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied ones counted once."""
        q = self.num_attention_heads * self.kv_channels
        kv = self.num_query_groups * self.kv_channels
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        if self.add_qkv_bias:
            attention += q + 2 * kv
        if self.qk_layernorm:
            attention += 2 * self.kv_channels
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        layer = attention + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_query_groups * self.kv_channels * bytes_per_element

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelArchitecture:
        """Inverse of `to_dict`."""
        values = dict(values)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        values["eos_token_ids"] = tuple(values.get("eos_token_ids") or ())
        return cls(**values)


DUMMY_SHAPES: dict[str, ModelArchitecture] = {
    "tiny": ModelArchitecture(
        "llama", 2, 64, 4, 2, 16, 128, 512, tie_word_embeddings=True, max_position_embeddings=4096
    ),
    "smollm2-135m": ModelArchitecture(
        "llama", 30, 576, 9, 3, 64, 1536, 49152, rotary_base=100000.0,
        tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "qwen3-0.6b": ModelArchitecture(
        "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 1e-6, 1000000.0, qk_layernorm=True,
        tie_word_embeddings=True, max_position_embeddings=40960,
    ),
    "qwen2-0.5b": ModelArchitecture(
        "qwen2", 24, 896, 14, 2, 64, 4864, 151936, 1e-6, 1000000.0, add_qkv_bias=True,
        tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "llama-3.2-1b": ModelArchitecture(
        "llama", 16, 2048, 32, 8, 64, 8192, 128256, 1e-5, 500000.0,
        RopeScaling(32.0, 1.0, 4.0, 8192), tie_word_embeddings=True,
        max_position_embeddings=131072,
    ),
    "llama-3.1-8b": ModelArchitecture(
        "llama", 32, 4096, 32, 8, 128, 14336, 128256, 1e-5, 500000.0,
        RopeScaling(8.0, 1.0, 4.0, 8192), max_position_embeddings=131072,
    ),
    "qwen3-8b": ModelArchitecture(
        "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e-6, 1000000.0, qk_layernorm=True,
        max_position_embeddings=40960,
    ),
}
"""Shapes for `dummy:SHAPE` models (random weights), from the models' public `config.json` files."""
