"""`ModelArchitecture`: sizes and options of a model, without its weights; every loader makes one.

`ModelArchitecture` imports neither torch nor Megatron, so `megatron-async info` and the checkpoint
readers can use it cheaply. `models/hybrid.py` turns it into a Megatron-Core model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_async.models.sizes import (
    LARGEST_EXPERT_WEIGHTS,
    SIZES_OF,
    DeltaSizes,
    MambaSizes,
    size_problem,
)

KINDS = {
    "*": "attention",
    "-": "MLP",
    "E": "experts",
    "M": "Mamba-2",
    "G": "Gated DeltaNet",
}
"""Characters of a layer pattern that are served, as Megatron-Core's `HybridModel` has them."""
ATTENTION, MLP, EXPERTS, MAMBA, DELTA = KINDS
RECURRENT = "".join(SIZES_OF)
"""Kinds with a state of fixed size for each request."""
MTP_KINDS = ATTENTION + MLP + EXPERTS
"""Kinds that are served in a depth of multi-token prediction."""


LLAMA3, LINEAR, YARN = "llama3", "linear", "yarn"
"""Kinds of `RopeScaling`, by Hugging Face's names."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rope's frequencies: of the long waves alone (Llama 3), of those between two
    numbers of turns in part (YaRN, Peng et al. 2023), or of all alike."""

    factor: float
    low_freq_factor: float = 1.0
    """Llama 3's, as the next two fields."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    kind: str = LLAMA3
    beta_fast: float = 32.0
    """YaRN's, as all that follow: waves with more turns in the original context are kept."""
    beta_slow: float = 1.0
    """Waves with fewer turns are stretched by the whole factor."""
    truncate: bool = True
    """The first and the last wave between the two are whole numbers."""
    attention_factor: float = 1.0
    """Factor of cos and sin, and so its square of the scores."""


def yarn_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """`RopeScaling.attention_factor` where none is given: 0.1 ln(factor) + 1, or the ratio of two
    such numbers (DeepSeek's `mscale`) if neither is None."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    if mscale is not None and mscale_all_dim is not None:
        return grown(mscale) / grown(mscale_all_dim)
    return grown(1.0)


@dataclass(frozen=True)
class ModelArchitecture:
    """Shape and conventions of a decoder-only language model: a transformer, dense or a mixture of
    experts, or a hybrid with Mamba-2 or Gated DeltaNet layers.

    All sizes are counts of elements; `kv_channels` is the size of one attention head. Where the
    pattern has no layers of a kind, the sizes of that kind are not used.

    Raises:
        ValueError: the pattern has unknown characters, or does not fit the number of layers; value
            heads of Gated DeltaNet are not a multiple of its key heads; a size is larger than any
            model's.
    """

    model_type: str
    """Hugging Face family name, such as "llama", "qwen3_moe" or "nemotron_h"."""
    num_layers: int
    """Layers as the family counts them. Each is one character of the pattern (Nemotron-H, Mamba2),
    or two: a layer of attention, Mamba-2 or Gated DeltaNet and an MLP or experts."""
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (grouped-query attention)."""
    kv_channels: int
    """Dimension of one head."""
    ffn_hidden_size: int
    """Inner size of a dense MLP."""
    vocab_size: int
    """Rows of the embedding matrix."""
    layernorm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    window_rotary_base: float | None = None
    """Rope base of window layers, whose frequencies are not scaled (Gemma 3); None: theirs are
    those of all layers."""
    no_rope_freq: tuple[int, ...] = ()
    """A 1 for each of `num_layers` without rope and a 0 for each other one; (): all have it."""
    add_qkv_bias: bool = False
    """Biases on the q, k and v projections (Qwen2)."""
    add_bias_linear: bool = False
    """Biases on these, on attention's output, on both products of MLPs and experts, and on the
    router (gpt-oss)."""
    softmax_type: str = "vanilla"
    """Megatron's name of attention's sinks: "vanilla": none; "learnable": a learned score of each
    head takes part in the softmax and has no value (gpt-oss); "off-by-one": a score of 0."""
    qk_layernorm: bool = False
    """RMSNorm on each query and key head before rope (Qwen3)."""
    attention_output_gate: bool = False
    """The output of attention is multiplied by the sigmoid of a gate, which `linear_qkv` computes
    together with the queries (Qwen3-Next)."""
    layernorm_zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight (Qwen3-Next)."""
    tie_word_embeddings: bool = False
    """The output projection is the embedding matrix."""
    max_position_embeddings: int = 2048
    """Longest sequence that the model was trained for, tokens."""
    sliding_window: int | None = None
    """Keys that a token of a window layer sees, its own among them; None: no layer has a window."""
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    """Which of `num_layers` have the window, by Megatron's rule: None: all; n: all but each n-th;
    or a 1 for each that has it and a 0 for each other one."""
    eos_token_ids: tuple[int, ...] = field(default=())
    """Tokens that end a generation, the tokenizer's own first; may be empty."""
    bos_token_id: int | None = None
    num_moe_experts: int = 0
    """Experts of a mixture-of-experts layer; 0: the model is dense."""
    moe_router_topk: int = 0
    """Experts that a token goes to."""
    moe_ffn_hidden_size: int = 0
    """Inner size of one expert."""
    moe_router_pre_softmax: bool = False
    """The chosen experts' weights are their softmax among all experts; else among the chosen (which
    Hugging Face calls `norm_topk_prob`)."""
    pattern: str = ""
    """Megatron's layer pattern, one character a layer (see `KINDS`). Given empty: for each of
    `num_layers` attention, and then experts if there are any, else an MLP."""
    activation: str = "silu"
    """Activation of MLPs and experts: of a gate, "silu" (SwiGLU), "quick_gelu" or "fast_gelu"; or
    "squared_relu" without a gate."""
    activation_func_clamp_value: float | None = None
    """Upper bound of the gate, and bound on both sides of what it multiplies; None: none."""
    glu_linear_offset: float = 0.0
    """Added to what the gate multiplies."""
    position_embedding_type: str = "rope"
    """"rope" or "none", Megatron's names."""
    rotary_percent: float = 1.0
    """Share of each head that rope turns."""
    moe_router_score_function: str = "softmax"
    """"softmax" of the router's logits, or "sigmoid" of each; the latter are divided by their sum
    over the chosen experts."""
    moe_router_enable_expert_bias: bool = False
    """Experts are chosen by score plus a bias for each expert; their weights leave out the bias."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the chosen experts' final weights; None: 1."""
    moe_shared_expert_intermediate_size: int = 0
    """Inner size of the shared expert, which processes every token; 0: there is none."""
    moe_shared_expert_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a gate, one number a token."""
    mamba_num_heads: int = 0
    """Heads of a Mamba-2 layer."""
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    """Size of the state for each element of a head."""
    mamba_num_groups: int = 0
    """Groups of heads that share B and C; the gated norm is over the elements of a group."""
    mamba_norm_epsilon: float = 1e-5
    """Epsilon of the gated norm; Megatron-Core's is fixed."""
    linear_num_key_heads: int = 0
    """Heads of queries and keys of a Gated DeltaNet layer."""
    linear_num_value_heads: int = 0
    """Heads of values, a multiple of the key heads: each group of value heads shares one query and
    key."""
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    embedding_multiplier: float = 1.0
    """Factor of embeddings (this and the next three are Granite's)."""
    logits_scaling: float = 1.0
    """Divisor of logits."""
    residual_multiplier: float = 1.0
    """Factor of every layer's output before it is added to the residual stream. Loaders multiply
    the weights of each layer's last product by this factor."""
    attention_multiplier: float | None = None
    """Scale of attention scores before the softmax; None: 1 / sqrt(head size)."""
    has_post_norms: bool = False
    """The output of each layer has a norm before it is added to the residual stream (Gemma 2)."""
    attn_logit_softcapping: float | None = None
    """Bound of scaled attention scores: cap * tanh(score / cap) (Gemma 2); None: none."""
    final_logit_softcapping: float | None = None
    """Bound of logits, in the same way."""
    mtp_pattern: str = ""
    """Layer pattern of one depth of multi-token prediction (MTP), such as "*-"; "": the model has
    none. `pattern` and the model's counts do not include MTP. Of its kinds `MTP_KINDS` are
    served."""
    mtp_num_depths: int = 0
    """Depths of MTP with weights of their own."""
    mtp_use_repeated_layer: bool = False
    """The one depth was trained to be run again for further tokens (Megatron-Core's flag)."""
    mtp_hidden_before_norm: bool = False
    """The first depth takes the model's hidden state before its final norm (MiMo); else after it,
    as in Megatron-Core."""

    def __post_init__(self) -> None:
        self._check_sizes()
        if not self.pattern:
            dense = ATTENTION + (EXPERTS if self.num_moe_experts else MLP)
            object.__setattr__(self, "pattern", dense * self.num_layers)
        unknown = sorted(set(self.pattern) - KINDS.keys())
        if unknown:
            known = ", ".join(f"{kind!r} ({name})" for kind, name in KINDS.items())
            raise ValueError(f"layer pattern {self.pattern!r} has {unknown}: it may have {known}.")
        if len(self.pattern) not in (self.num_layers, 2 * self.num_layers):
            raise ValueError(
                f"layer pattern {self.pattern!r} has {len(self.pattern)} characters, but "
                f"num_layers = {self.num_layers}: one or two for each are right."
            )
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if DELTA in self.pattern and (keys < 1 or values < 1 or values % keys):
            raise ValueError(
                f"linear_num_value_heads = {values} must be a multiple of linear_num_key_heads = "
                f"{keys}, both 1 or more."
            )
        self._check_window()
        self._check_mtp()

    def _check_window(self) -> None:
        window, skips = self.sliding_window, self.window_attn_skip_freq
        if self.no_rope_freq and len(self.no_rope_freq) != self.num_layers:
            raise ValueError(
                f"no_rope_freq has {len(self.no_rope_freq)} entries, but num_layers = "
                f"{self.num_layers}: give one for each layer."
            )
        if window is not None and window < 1:
            raise ValueError(f"sliding_window = {window} must be 1 key or more, or None.")
        if isinstance(skips, tuple) and len(skips) != self.num_layers:
            raise ValueError(
                f"window_attn_skip_freq has {len(skips)} entries, but num_layers = "
                f"{self.num_layers}: give one for each layer."
            )
        if isinstance(skips, int) and skips < 1:
            raise ValueError(f"window_attn_skip_freq = {skips} must be 1 or more.")

    def _check_sizes(self) -> None:
        """Check the sizes from which lists are made, before any is."""
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if problem := size_problem(name, getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)!r} {problem}.")
        for name in ("num_moe_experts", "mtp_num_depths"):
            value = getattr(self, name)
            if value and (problem := size_problem(name, value)):
                raise ValueError(f"{name} = {value!r} {problem}.")
        layers = self.pattern.count(EXPERTS) if self.pattern else self.num_layers
        if layers * self.num_moe_experts > LARGEST_EXPERT_WEIGHTS:
            raise ValueError(
                f"num_moe_experts = {self.num_moe_experts} in {layers} layers are more experts "
                f"than any model has (at most {LARGEST_EXPERT_WEIGHTS} in all)."
            )

    def _check_mtp(self) -> None:
        pattern, depths = self.mtp_pattern, self.mtp_num_depths
        unknown = sorted(set(pattern) - KINDS.keys())
        if unknown:
            known = ", ".join(f"{kind!r} ({name})" for kind, name in KINDS.items())
            raise ValueError(f"mtp_pattern {pattern!r} has {unknown}: it may have {known}.")
        if depths < 0 or bool(pattern) != (depths > 0):
            raise ValueError(
                f"mtp_num_depths = {depths} with mtp_pattern = {pattern!r}: a model with "
                "multi-token prediction has a pattern and 1 depth or more, another neither."
            )
        if self.mtp_use_repeated_layer and depths != 1:
            raise ValueError(
                f"mtp_use_repeated_layer = True with mtp_num_depths = {depths}: it is one depth "
                "that is repeated."
            )
        if EXPERTS in pattern and not self.num_moe_experts:
            raise ValueError(f"mtp_pattern {pattern!r} has experts, but num_moe_experts = 0.")

    @property
    def is_gated(self) -> bool:
        """Whether MLPs and experts have a gate."""
        return self.activation != "squared_relu"

    @property
    def layers_per_block(self) -> int:
        """Characters of the pattern for each of `num_layers`: 1 or 2."""
        return len(self.pattern) // self.num_layers

    @property
    def attention_windows(self) -> tuple[int, ...]:
        """Keys that a token sees in each attention layer; 0: all."""
        each = self.layers_per_block
        layers = [n // each for n, kind in enumerate(self.pattern) if kind == ATTENTION]
        return tuple(
            (self.sliding_window or 0) * has_window(self.window_attn_skip_freq, layer + 1)
            for layer in layers
        )

    def count(self, kinds: str) -> int:
        """Number of layers of these kinds, such as "*" or "-E"."""
        return sum(self.pattern.count(kind) for kind in kinds)

    @property
    def mamba(self) -> MambaSizes:
        """Sizes of its Mamba-2 layers, on all ranks together."""
        return MambaSizes.of(self)

    @property
    def delta(self) -> DeltaSizes:
        """Sizes of its Gated DeltaNet layers, on all ranks together."""
        return DeltaSizes.of(self)

    @property
    def num_parameters(self) -> int:
        """Number of weights without those of MTP, tied ones counted once."""
        return self._parameters(self.num_moe_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that process one token, without MTP: of the experts, only those that
        the token goes to."""
        return self._parameters(self.moe_router_topk)

    @property
    def without_mtp(self) -> ModelArchitecture:
        """A copy without the layers of multi-token prediction."""
        return replace(
            self,
            mtp_pattern="",
            mtp_num_depths=0,
            mtp_use_repeated_layer=False,
            mtp_hidden_before_norm=False,
        )

    @property
    def mtp_parameters(self) -> int:
        """Number of weights of all depths of MTP; embedding and output layer are the model's."""
        layers = (self.layer_parameters(kind, self.num_moe_experts) for kind in self.mtp_pattern)
        # enorm, hnorm and final_layernorm; eh_proj
        ends = 3 * self.hidden_size + 2 * self.hidden_size**2
        return self.mtp_num_depths * (sum(layers) + ends)

    def _parameters(self, experts: int) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = sum(
            self.pattern.count(kind) * self.layer_parameters(kind, experts)
            for kind in set(self.pattern)
        )
        return layers + embeddings + self.hidden_size

    def layer_parameters(self, kind: str, experts: int) -> int:
        """Number of weights of a layer of a kind, its norm included, counting `experts` experts of
        a mixture."""
        if kind in RECURRENT:
            sizes = SIZES_OF[kind].of(self)
            own = sizes.own_parameters
            return self.hidden_size * (1 + sizes.in_proj + sizes.channels) + own
        return self.hidden_size + _PARAMETERS[kind](self, experts)

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of KV cache that one token takes over all layers but those of MTP; attention alone
        has one."""
        return self.count(ATTENTION) * self._kv_bytes_per_layer(bytes_per_element)

    def window_kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of them in layers with a window, which hold no more than the last tokens."""
        layers = sum(window > 0 for window in self.attention_windows)
        return layers * self._kv_bytes_per_layer(bytes_per_element)

    def mtp_kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of KV cache that one token takes over the layers of MTP, where MTP is built."""
        layers = self.mtp_num_depths * self.mtp_pattern.count(ATTENTION)
        return layers * self._kv_bytes_per_layer(bytes_per_element)

    def _kv_bytes_per_layer(self, bytes_per_element: int) -> int:
        return 2 * self.num_query_groups * self.kv_channels * bytes_per_element

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelArchitecture:
        """Inverse of `to_dict`; also reads older mappings, without the pattern.

        Raises:
            TypeError: an unknown or missing field.
            ValueError: fields that do not fit.
        """
        values = dict(values)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        for name in ("eos_token_ids", "no_rope_freq"):
            values[name] = tuple(values.get(name) or ())
        if isinstance(skips := values.get("window_attn_skip_freq"), list):
            values["window_attn_skip_freq"] = tuple(skips)
        dense_layers = values.pop("dense_layers", ())
        if dense_layers:
            values["pattern"] = moe_pattern(values["num_layers"], dense_layers)
        return cls(**values)


def has_window(skips: int | Sequence[int] | None, layer: int) -> bool:
    """Whether a layer, counted from 1, of a model with windows has one: Megatron's rule of
    `window_attn_skip_freq`."""
    if skips is None:
        return True
    return layer % skips != 0 if isinstance(skips, int) else bool(skips[layer - 1])


def moe_pattern(num_layers: int, dense_layers: tuple[int, ...] = ()) -> str:
    """Pattern of a transformer whose layers have experts, but for some that have an MLP."""
    return "".join(
        ATTENTION + (MLP if layer in dense_layers else EXPERTS) for layer in range(num_layers)
    )


def _attention(a: ModelArchitecture, _experts: int) -> int:
    q, kv = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    gate = q * a.attention_output_gate
    biases = (q + gate + 2 * kv) * (a.add_qkv_bias or a.add_bias_linear)
    biases += a.hidden_size * a.add_bias_linear
    biases += a.num_attention_heads * (a.softmax_type == "learnable")
    norms = 2 * a.kv_channels * a.qk_layernorm + a.hidden_size * a.has_post_norms
    return a.hidden_size * (2 * q + gate + 2 * kv) + biases + norms


def _mlp(a: ModelArchitecture, _experts: int) -> int:
    norm = a.hidden_size * a.has_post_norms
    return _matrices(a) * a.hidden_size * a.ffn_hidden_size + _biases(a, a.ffn_hidden_size) + norm


def _experts(a: ModelArchitecture, experts: int) -> int:
    of_expert = a.hidden_size + a.moe_router_enable_expert_bias + a.add_bias_linear
    router = a.num_moe_experts * of_expert + experts * _biases(a, a.moe_ffn_hidden_size)
    gate = a.hidden_size * a.moe_shared_expert_gate
    units = experts * a.moe_ffn_hidden_size + a.moe_shared_expert_intermediate_size
    return router + gate + _matrices(a) * a.hidden_size * units


def _matrices(a: ModelArchitecture) -> int:
    """Matrices of an MLP: gate, up and down, or up and down."""
    return 3 if a.is_gated else 2


def _biases(a: ModelArchitecture, ffn: int) -> int:
    """Biases of an MLP of so many units."""
    return ((1 + a.is_gated) * ffn + a.hidden_size) * a.add_bias_linear


_PARAMETERS: dict[str, Callable[[ModelArchitecture, int], int]] = {
    "*": _attention,
    "-": _mlp,
    "E": _experts,
}
