"""Folders of tiny models with multi-token prediction (MTP), their tensors named as published ones.

A depth of MTP is made from a model of transformers that has the layers of one depth and nothing
else; its final norm is the depth's. So what a depth computes is what this model makes of
`eh_proj`'s output, given as `inputs_embeds`. Names, and the order in which `eh_proj` takes its two
inputs, are written down here from vLLM's loaders and forwards (`qwen3_next_mtp.py`,
`qwen3_5_mtp.py`, `nemotron_h_mtp.py`, `mimo_mtp.py`), and from lists of published tensors.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit_tests.checkpoints.hybrid_families import COMMON, HYBRIDS, make_hybrid

QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj": "mtp.fc.weight",
    "final": "mtp.norm.weight",
    "layer 0": "mtp.layers.0.",
}
NEMOTRON_NAMES = {
    "enorm": "mtp.layers.0.enorm.weight",
    "hnorm": "mtp.layers.0.hnorm.weight",
    "eh_proj": "mtp.layers.0.eh_proj.weight",
    "final": "mtp.layers.1.final_layernorm.weight",
    "layer 0": "mtp.layers.0.",
    "layer 1": "mtp.layers.1.",
}
MIMO_NAMES = {
    "enorm": "model.mtp_layers.0.token_layernorm.weight",
    "hnorm": "model.mtp_layers.0.hidden_layernorm.weight",
    "eh_proj": "model.mtp_layers.0.input_proj.weight",
    "final": "model.mtp_layers.0.final_layernorm.weight",
    "layer 0": "model.mtp_layers.0.",
}
FULL_ATTENTION = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@dataclass(frozen=True)
class MtpFamily:
    """A family whose folders bring MTP."""

    names: dict[str, str]
    config: dict[str, Any]
    """What its `config.json` says of MTP."""
    pattern: str
    """Pattern of a depth."""
    layers: dict[str, Any]
    """Options of a model of transformers that has the layers of one depth."""
    is_hidden_first: bool = False
    norms_add_one: bool = False
    has_hidden_before_norm: bool = False


MTP_FAMILIES = {
    # Its published config.json says nothing of MTP.
    "qwen3-next": MtpFamily(
        QWEN_NAMES, {}, "*E", FULL_ATTENTION | {"mlp_only_layers": []}, norms_add_one=True
    ),
    "qwen3.5": MtpFamily(
        QWEN_NAMES,
        {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        "*-",
        FULL_ATTENTION,
        norms_add_one=True,
    ),
    "qwen3.5-moe": MtpFamily(
        QWEN_NAMES,
        {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        "*E",
        FULL_ATTENTION,
        norms_add_one=True,
    ),
    "nemotron-3": MtpFamily(
        NEMOTRON_NAMES,
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
        "*E",
        {"hybrid_override_pattern": "*E"},
    ),
    "mimo": MtpFamily(
        MIMO_NAMES,
        {"num_nextn_predict_layers": 1},
        "*-",
        {"num_hidden_layers": 1},
        is_hidden_first=True,
        has_hidden_before_norm=True,
    ),
}


def make_trunk(name: str, **changes: Any) -> Any:
    """A model of transformers without MTP."""
    if name != "mimo":
        kind, options = HYBRIDS[name]
        HYBRIDS["changed"] = (kind, options | changes)
        try:
            return make_hybrid("changed")
        finally:
            del HYBRIDS["changed"]
    import transformers

    options = {"num_hidden_layers": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5}
    config = transformers.Qwen2Config(**COMMON | options | changes)
    torch.manual_seed(1)
    model = transformers.Qwen2ForCausalLM(config).eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1.0 if "norm" in key else 0.0, 0.2)
    return model


def make_layers(name: str) -> Any:
    """The model that has the layers of one depth, with other weights than the trunk's."""
    model = make_trunk(name, **MTP_FAMILIES[name].layers)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.1 * noise.to(parameter.dtype)
    return model


def saved_tensors(model: Any, folder: Path) -> dict[str, Tensor]:
    """Tensors in the form that transformers writes, which is the published one."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def mtp_tensors(name: str, layers: Any, folder: Path) -> dict[str, Tensor]:
    """Tensors of one depth by their published names."""
    family, found = MTP_FAMILIES[name], {}
    hidden = layers.config.hidden_size
    for key, tensor in saved_tensors(layers, folder).items():
        layer = re.match(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", key)
        if layer:
            found[family.names[f"layer {layer[1]}"] + layer[2]] = tensor
        elif key in ("model.norm.weight", "backbone.norm_f.weight"):
            found[family.names["final"]] = tensor
    generator = torch.Generator().manual_seed(9)
    for norm in ("enorm", "hnorm"):
        values = 0.2 * torch.randn(hidden, generator=generator)
        found[family.names[norm]] = values + (not family.norms_add_one)
    joint = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    return found | {family.names["eh_proj"]: joint}


def write_folder(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, shards: int = 3
) -> dict[str, Tensor]:
    """A folder in so many shards with an index, the last of which holds MTP alone; returns MTP's
    tensors."""
    family = MTP_FAMILIES[name]
    trunk = saved_tensors(make_trunk(name).to(dtype), folder)
    mtp = mtp_tensors(name, make_layers(name).to(dtype), folder / "layers")
    mtp = {key: tensor.to(dtype) for key, tensor in mtp.items()}
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    keys = sorted(trunk)
    parts = [{key: trunk[key] for key in keys[start :: shards - 1]} for start in range(shards - 1)]
    for number, tensors in enumerate([*parts, mtp], 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file = folder / "config.json"
    config = json.loads(file.read_text()) | family.config
    if name == "mimo":
        config |= {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "attention_bias": True,
        }
    file.write_text(json.dumps(config))
    return mtp


@torch.inference_mode()
def their_depth(
    name: str, layers: Any, tensors: dict[str, Tensor], embedded: Tensor, hidden: Tensor
) -> Tensor:
    """Hidden states `[tokens, hidden]` of a depth, by transformers' layers and the formulas of
    vLLM's forward, from `[tokens, hidden]` of embeddings and of hidden states."""
    family = MTP_FAMILIES[name]
    config = layers.config
    eps = getattr(config, "layer_norm_epsilon", None) or config.rms_norm_eps

    def normed(x: Tensor, norm: str) -> Tensor:
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return unit * (tensors[family.names[norm]] + family.norms_add_one)

    parts = [normed(embedded, "enorm"), normed(hidden, "hnorm")]
    if family.is_hidden_first:
        parts.reverse()
    joined = torch.cat(parts, -1) @ tensors[family.names["eh_proj"]].t()
    positions = torch.arange(len(hidden))[None]
    output = layers.model(inputs_embeds=joined[None], position_ids=positions, use_cache=False)
    found: Tensor = output.last_hidden_state[0]
    return found
