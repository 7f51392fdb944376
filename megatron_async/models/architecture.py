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
    """Shape and conventions of a decoder-only transformer, dense or a mixture of experts.

    All sizes are counts of elements; `kv_channels` is the size of one attention head.
    """

    model_type: str
    """Hugging Face family name: "llama", "mistral", "qwen2", "qwen3", "mixtral" or "qwen3_moe"."""
    num_layers: int
    """Transformer layers (each one attention and one MLP or mixture of experts)."""
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (grouped-query attention)."""
    kv_channels: int
    """Dimension of one head."""
    ffn_hidden_size: int
    """Of a dense MLP."""
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
    num_moe_experts: int = 0
    """Experts of a mixture-of-experts layer; 0: the model is dense."""
    moe_router_topk: int = 0
    """Experts that a token goes to."""
    moe_ffn_hidden_size: int = 0
    """Of one expert."""
    moe_router_pre_softmax: bool = False
    """The chosen experts' weights are their softmax among all experts; else among the chosen (which
    Hugging Face calls `norm_topk_prob`)."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture-of-experts model that have a dense MLP."""

    @property
    def hybrid_layer_pattern(self) -> str:
        """Megatron's layer pattern: attention (`*`), then MLP (`-`) or experts (`E`)."""
        return "".join("*E" if self.is_moe(layer) else "*-" for layer in range(self.num_layers))

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts instead of a dense MLP."""
        return self.num_moe_experts > 0 and layer not in self.dense_layers

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied ones counted once."""
        return self._parameters(self.num_moe_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token meets: of the experts, those that it goes to."""
        return self._parameters(self.moe_router_topk)

    def _parameters(self, experts: int) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.layer_parameters(experts) + embeddings + self.hidden_size

    def layer_parameters(self, experts: int) -> int:
        """Number of weights of all layers, if each mixture had so many experts."""
        q = self.num_attention_heads * self.kv_channels
        kv = self.num_query_groups * self.kv_channels
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        if self.add_qkv_bias:
            attention += q + 2 * kv
        if self.qk_layernorm:
            attention += 2 * self.kv_channels
        dense = 3 * self.hidden_size * self.ffn_hidden_size
        expert = 3 * self.hidden_size * self.moe_ffn_hidden_size
        moe = self.num_moe_experts * self.hidden_size + experts * expert
        moe_layers = sum(map(self.is_moe, range(self.num_layers)))
        layers = self.num_layers * (attention + 2 * self.hidden_size)
        return layers + moe_layers * moe + (self.num_layers - moe_layers) * dense

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
        for name in ("eos_token_ids", "dense_layers"):
            values[name] = tuple(values.get(name) or ())
        return cls(**values)


DUMMY_SHAPES: dict[str, ModelArchitecture] = {
    "tiny": ModelArchitecture(
        "llama", 2, 64, 4, 2, 16, 128, 512, tie_word_embeddings=True, max_position_embeddings=4096
    ),
    "smollm2-135m": ModelArchitecture(
        "llama",
        30,
        576,
        9,
        3,
        64,
        1536,
        49152,
        rotary_base=100000.0,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "qwen3-0.6b": ModelArchitecture(
        "qwen3",
        28,
        1024,
        16,
        8,
        128,
        3072,
        151936,
        1e-6,
        1000000.0,
        qk_layernorm=True,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    ),
    "qwen2-0.5b": ModelArchitecture(
        "qwen2",
        24,
        896,
        14,
        2,
        64,
        4864,
        151936,
        1e-6,
        1000000.0,
        add_qkv_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
    "llama-3.2-1b": ModelArchitecture(
        "llama",
        16,
        2048,
        32,
        8,
        64,
        8192,
        128256,
        1e-5,
        500000.0,
        RopeScaling(32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
        max_position_embeddings=131072,
    ),
    "llama-3.1-8b": ModelArchitecture(
        "llama",
        32,
        4096,
        32,
        8,
        128,
        14336,
        128256,
        1e-5,
        500000.0,
        RopeScaling(8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
    ),
    "qwen3-8b": ModelArchitecture(
        "qwen3",
        36,
        4096,
        32,
        8,
        128,
        12288,
        151936,
        1e-6,
        1000000.0,
        qk_layernorm=True,
        max_position_embeddings=40960,
    ),
    "tiny-moe": ModelArchitecture(
        "mixtral",
        2,
        64,
        4,
        2,
        16,
        128,
        512,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
    ),
    "mixtral-8x7b": ModelArchitecture(
        "mixtral",
        32,
        4096,
        32,
        8,
        128,
        14336,
        32000,
        1e-5,
        1000000.0,
        max_position_embeddings=32768,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=14336,
    ),
    "qwen3-30b-a3b": ModelArchitecture(
        "qwen3_moe",
        48,
        2048,
        32,
        4,
        128,
        6144,
        151936,
        1e-6,
        1000000.0,
        qk_layernorm=True,
        max_position_embeddings=40960,
        num_moe_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
    ),
}
"""Shapes for `dummy:SHAPE` models (random weights), from the models' public `config.json` files."""
