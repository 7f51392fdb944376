"""Families of tiny models, made by transformers with random weights, and how weights compare."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.checkpoints.mapping import weights
from megatron_async.models.architecture import ModelArchitecture

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
MIXER = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
NEMOTRON = {
    "head_dim": 16,
    "intermediate_size": 96,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
}
GRANITE = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 72,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.246,
    "attention_multiplier": 0.125,
}
QWEN = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
QWEN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron-3": (
        "NemotronH",
        {
            **NEMOTRON,
            "hybrid_override_pattern": "MEM*-E",
            "n_routed_experts": 6,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 72,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron-h": ("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "M-M*-"}),
    "granite": (
        "GraniteMoeHybrid",
        {**GRANITE, **MIXER, "num_local_experts": 0, "intermediate_size": 72},
    ),
    "granite-moe": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            **MIXER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
    ),
    "bamba": (
        "Bamba",
        {**MIXER, "num_hidden_layers": 3, "attn_layer_indices": [1], "intermediate_size": 96},
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "expand": 2,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**QWEN, **QWEN_EXPERTS, "mlp_only_layers": [1], "intermediate_size": 72},
    ),
    "qwen3.5": ("Qwen3_5", {**QWEN, "intermediate_size": 72}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**QWEN, **QWEN_EXPERTS}),
}


ATTENDING: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron of attention": (
        "NemotronH",
        HYBRIDS["nemotron-3"][1] | {"hybrid_override_pattern": "*-*EE*-"},
    ),
    "granite of attention": (
        "GraniteMoeHybrid",
        HYBRIDS["granite-moe"][1] | {"layer_types": ["full_attention"] * 3},
    ),
}
"""Hybrid families without Mamba-2 layers, with everything else that they have."""
IN_GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron of experts": (
        "NemotronH",
        HYBRIDS["nemotron-3"][1]
        | {"hybrid_override_pattern": "MEM*E", "moe_intermediate_size": 32},
    ),
    "granite of whole blocks": (
        "GraniteMoeHybrid",
        HYBRIDS["granite"][1]
        | {"mamba_n_heads": 16, "mamba_d_head": 8, "shared_intermediate_size": 96},
    ),
    "granite of attention, dense": (
        "GraniteMoeHybrid",
        HYBRIDS["granite"][1]
        | {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
    ),
}
"""What llama.cpp has architectures for, beside these."""


def make_hybrid(name: str) -> Any:
    """A model of transformers whose weights say nothing by chance: norms are not ones, biases not
    zeros, and states decay slowly enough to matter."""
    import transformers

    kind, options = (HYBRIDS | ATTENDING | IN_GGUF)[name]
    torch.manual_seed(1)
    config_kind = f"{kind}Text" if kind.startswith("Qwen3_5") else kind
    config = getattr(transformers, f"{config_kind}Config")(**COMMON | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if parameter_name.endswith("A_log"):
            parameter.data.uniform_(-3.0, 0.5)
        elif parameter_name.endswith(("dt_bias", "correction_bias")):
            parameter.data.normal_(0.0, 0.5)
        elif parameter.dim() == 1 and "inv_freq" not in parameter_name:
            is_norm = "norm" in parameter_name or parameter_name.endswith(".D")
            if kind.startswith("Qwen"):  # where others multiply by 1 + weight
                is_norm = "linear_attn.norm" in parameter_name
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2)
        elif "conv1d" in parameter_name or "router" in parameter_name or "gate" in parameter_name:
            parameter.data.normal_(0.0, 0.5)
    return without_least_step(model)


def without_least_step(model: Any) -> Any:
    """A model of transformers, whose Nemotron-H raises small time steps, where neither the model's
    own code nor Megatron-Core does."""
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = (0.0, float("inf"))
    return model


def save_hybrid(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save it as transformers does."""
    make_hybrid(name).to(dtype).save_pretrained(folder)
    return folder


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model folder with other values in config.json; "absent" removes a key."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "absent"}
    (target / "config.json").write_text(json.dumps(config))
    return target


@torch.inference_mode()
def their_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of one sequence by transformers."""
    ids = torch.tensor([tokens])
    # Always given: Bamba's own are wrong with a cache. Mamba2 takes none.
    places = {"position_ids": torch.arange(len(tokens))[None]}
    if model.config.model_type == "mamba2":
        places = {}
    logits: torch.Tensor = model(ids, use_cache=False, **places).logits[0]
    return logits


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-wide": ("Llama", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"head_dim": 24, "sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3-bf16": ("Qwen3", {"head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-experts": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
}


def huggingface_state(model: nn.Module, architecture: ModelArchitecture) -> dict[str, Tensor]:
    """Our model's weights under their Hugging Face names."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state: dict[str, Tensor] = {}
    for weight in weights(architecture):
        state |= weight.split(parameters.pop(weight.name))
    assert not parameters
    return state


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
