"""Every key of transformers' configuration classes, in every way that a `config.json` can have it.

`check_settings.py` runs models of these files, and a test compares what both sides read in them
(`settings_theirs.py`).
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from settings_families import COMPOSITES, composite_config, config_class, plain_config

ABSENT = object()
"""A key that a file leaves out."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "old spelling": {"rope_parameters": ABSENT, "rope_theta": 700.0},
    "old spelling, null": {"rope_parameters": ABSENT, "rope_theta": 700.0, "rope_scaling": None},
    "old llama3": {"rope_parameters": ABSENT, "rope_theta": 700.0, "rope_scaling": LLAMA3},
    "old llama3 by type": {
        "rope_parameters": ABSENT,
        "rope_theta": 700.0,
        "rope_scaling": LLAMA3 | {"rope_type": ABSENT, "type": "llama3"},
    },
    "theta null": {"rope_parameters": ABSENT, "rope_theta": None},
    "theta inside null": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "theta at both levels": {"rope_theta": 700.0},
    "theta at the top, kind inside": {
        "rope_parameters": {"rope_type": "default"}, "rope_theta": 700.0,
    },
    "theta at neither": {"rope_parameters": {"rope_type": "default"}},
    "null": {"rope_parameters": None},
    "left out": {"rope_parameters": ABSENT},
    "empty": {"rope_parameters": {}},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 700.0}},
    "llama3 without its length": {
        "rope_parameters": {
            **{k: v for k, v in LLAMA3.items() if "original" not in k}, "rope_theta": 700.0,
        },
    },
    "llama3, length at the top": {
        "rope_parameters": {
            **{k: v for k, v in LLAMA3.items() if "original" not in k}, "rope_theta": 700.0,
        },
        "original_max_position_embeddings": 16,
    },
    "llama3, two lengths": {
        "rope_parameters": LLAMA3 | {"rope_theta": 700.0}, "original_max_position_embeddings": 16,
    },
    "llama3 beside default": {"rope_scaling": LLAMA3},
    "llama3 with theta beside default": {"rope_scaling": LLAMA3 | {"rope_theta": 3000.0}},
    "llama3 beside default of its theta": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "rope_theta": 700.0,
        "rope_scaling": LLAMA3,
    },
    "default beside llama3": {
        "rope_parameters": LLAMA3 | {"rope_theta": 700.0},
        "rope_scaling": {"rope_type": "default", "rope_theta": 700.0},
    },
    "yarn beside default": {"rope_scaling": YARN},
    "yarn by type": {"rope_scaling": {**YARN, "rope_type": ABSENT, "type": "yarn"}},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 700.0}},
    "yarn with attention_factor": {"rope_parameters": YARN | {"attention_factor": 0.5}},
    "linear beside default": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        },
    },
    "another kind": {"rope_scaling": {"rope_type": "spiral"}},
    "two kinds": {"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 4.0}},
    "factor without a kind": {"rope_scaling": {"factor": 4.0}},
    "unknown key": {"rope_parameters": {"rope_type": "default", "mscale": 2.0}},
    "a set a layer type": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 700.0}},
    },
    "share at the top": {"partial_rotary_factor": 0.25},
    "share at the top alone": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "partial_rotary_factor": 0.25,
    },
    "share at the top null": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "partial_rotary_factor": None,
    },
    "share inside": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.25,
        },
    },
    "share inside null": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": None,
        },
    },
    "not an object": {"rope_parameters": "default"},
    "rope_local_base_freq": {"rope_local_base_freq": 100.0},
}  # fmt: skip
"""Rope in all spellings, and changes that each is."""
OTHERS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", "gelu_tanh", "swish", "relu2"),
    "mlp_hidden_act": ("silu", "gelu"),
    "mamba_hidden_act": ("gelu",),
    "num_hidden_layers": (1, 3, 0, -1),
    "num_attention_heads": (2, 8, 3),
    "num_key_value_heads": (1, 4, 3, 8, 0),
    "head_dim": (16, 15, 0),
    "num_experts_per_tok": (1, 4, 9, 0),
    "num_local_experts": (2, 0, 5),
    "num_experts": (3, 0, 5),
    "n_routed_experts": (3, 0, 5),
    "sliding_window": (8, 300, 0),
    "use_sliding_window": (True,),
    "layer_types": (
        ["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"],
        ["linear_attention"] * 2, ["attention", "mamba"], ["nothing", "full_attention"], "all",
    ),
    "layers_block_type": (
        ["mamba", "attention", "mlp"], ["full_attention", "moe"], ["mamba"], ["gdn"], [],
    ),
    "hybrid_override_pattern": ("M*-", "ME", "MX"),
    "attn_layer_indices": ([0], [0, 1], [], [7], "0"),
    "mlp_only_layers": ([0], [0, 1], [], [5], "all"),
    "decoder_sparse_step": (2, 3, 0),
    "full_attention_interval": (1, 2),
    "time_step_limit": ([0.0, 0.1], [0.001, float("inf")], [0.0, float("inf")], [0.0], 0.5),
    "position_embedding_type": ("nope", "rope", "alibi"),
    "mamba_d_head": ("auto", 8, 32),
    "mamba_n_groups": (2,),
    "n_groups": (1, 4, 3),
    "mamba_expand": (1,),
    "expand": (1,),
    "hybrid": (),
    "quantization_config": ({"quant_method": "hqq"}, {}),
    "per_layer_config": ({"0": {"rms_norm_eps": 0.5}}, {}),
    "is_causal": (False, True),
    "dtype": ("bfloat16", "float32", "int3"),
    "torch_dtype": ("bfloat16", "torch.float16", "int3"),
    "architectures": (),
    "model_type": (),
    "tie_word_embeddings": (True,),
    "bos_token_id": (7,),
    "eos_token_id": (7, [7, 8]),
    "pad_token_id": (7,),
    "id2label": ({"0": "a"},),
    "label2id": ({"a": 0},),
    "problem_type": ("regression",),
    "transformers_version": ("4.40.0",),
    "return_dict": (False,),
    "mtp_layers_block_type": (["full_attention", "mlp"],),
    "num_nextn_predict_layers": (),
    "rope_parameters": (),
    "original_max_position_embeddings": (16,),
}  # fmt: skip
"""Other values of a key; of those that are not here they follow from the value's type."""
MORE = (
    "head_dim", "num_experts", "num_local_experts", "layers_block_type", "layer_types",
    "sliding_window", "use_sliding_window", "attention_bias", "mlp_bias", "norm_topk_prob",
    "hybrid_override_pattern", "full_attention_interval", "quantization_config",
    "per_layer_config", "is_causal", "torch_dtype", "hidden_act",
    "original_max_position_embeddings", "attn_logit_softcapping", "embedding_multiplier",
    "logits_scaling", "rms_norm_eps", "layer_norm_epsilon", "mamba_n_groups", "time_step_limit",
    "attention_chunk_size", "use_bidirectional_attention", "a_new_key",
)  # fmt: skip
"""Keys that a class may not have and a file may."""
TOGETHER: dict[str, dict[str, Any]] = {
    "all layers slide": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "no layer slides": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28},
    "one layer slides": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "window without a size": {"use_sliding_window": True, "sliding_window": None},
    "listed layers slide": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2,
    },
    "listed layers do not slide": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
        "layer_types": ["full_attention"] * 2,
    },
    "listed layers slide without the switch": {
        "sliding_window": 8, "layer_types": ["sliding_attention"] * 2,
    },
    "two names of the experts": {"num_experts": 4, "num_local_experts": 4},
    "two numbers of experts": {"num_experts": 4, "num_local_experts": 2},
}  # fmt: skip
"""Keys that count together."""


@dataclass(frozen=True)
class Variant:
    """A `config.json` of one family: which key it is about, what is done to the key, and all keys
    that differ from the family's plain file."""

    family: str
    key: str
    what: str
    config: dict[str, Any]
    changed: tuple[str, ...]

    @property
    def name(self) -> str:
        """One line for people."""
        return f"{self.family}: {self.key}: {self.what}"


def variants(family: str) -> Iterator[Variant]:
    """Every file of a family."""
    plain = plain_config(family)
    for key, what, changes in _changes(family, plain):
        yield Variant(family, key, what, _changed(plain, changes), tuple(changes))
    if family not in COMPOSITES:
        return
    outside = composite_config(family, plain)
    yield Variant(family, "text_config", "plain", outside, ())
    for key, what, changes in _changes(family, plain):
        inner = _changed(outside, {"text_config": _changed(plain, changes)})
        yield Variant(family, key, f"{what}, in text_config", inner, tuple(changes))
        outer = _changed(outside, changes)
        yield Variant(family, key, f"{what}, beside text_config", outer, tuple(changes))


def _changes(family: str, plain: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Key, what is done to it, and the changes of the file."""
    defaults = {
        field.name: field.default
        for field in fields(config_class(family))
        if field.default is not MISSING
    }
    for key in dict.fromkeys((*defaults, *MORE)):
        if key in ("architectures", "model_type"):
            continue
        yield key, "left out", {key: ABSENT}
        yield key, "null", {key: None}
        if key in defaults:
            yield key, "its default", {key: defaults[key]}
        value = plain.get(key)
        for other in OTHERS.get(key, _others(value if value is not None else defaults.get(key))):
            yield key, f"= {other!r}", {key: other}
    for name, changes in TOGETHER.items():
        yield next(iter(changes)), name, changes
    for name, changes in ROPES.items():
        yield "rope", name, changes


def _others(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value, "false", 1)
    if isinstance(value, int):
        return (value * 2, "32", -1, True)
    if isinstance(value, float):
        return (value * 1.5 + 0.25, "small", -1.0, float("nan"))
    return (True, 30.0)


def _changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = {k: _plain(v) for k, v in (content | changes).items()}
    return {key: value for key, value in found.items() if value is not ABSENT}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if v is not ABSENT}
    return value
