"""Folders of hybrid models as they are published: `config.json`, tensor names and shapes, shards.

Names and shapes are written down here by the publishers' rules, from the configuration alone, so
that `checkpoints/mapping.py` is checked by something that does not ask it. Configurations are those
of the model cards (nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, nvidia/Nemotron-H-8B-Base-8K,
ibm-granite/granite-4.0-h-350m), less what says nothing of the computation.

Files are sparse: a header, and holes where nobody wrote. So a folder of 63 GB takes some kilobytes.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

Shape = tuple[int, ...]

NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, math.inf],
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
NANO = NEMOTRON | {
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
NEMOTRON_H_8B = NEMOTRON | {
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
}
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "layer_types": ["attention" if n in (10, 13, 17, 27) else "mamba" for n in range(32)],
    "logits_scaling": 3,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 32768,
    "num_attention_heads": 12,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.246,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "shared_intermediate_size": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
BY_NAME = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def with_names(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration in the form of transformers 5: layers by their names."""
    pattern = config["hybrid_override_pattern"]
    rest = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    return rest | {"layers_block_type": [BY_NAME[kind] for kind in pattern]}


def cut(config: dict[str, Any], pattern: str, experts: int = 0) -> dict[str, Any]:
    """Fewer layers and experts of a Nemotron-H, each as large as it is."""
    found = config | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    return found | ({"n_routed_experts": experts} if experts else {})


def published_tensors(config: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes of a published model's tensors, in the order of its layers."""
    rules = {"nemotron_h": _nemotron, "granitemoehybrid": _granite}
    return dict(rules[config["model_type"]](config))


def _nemotron(c: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    yield "backbone.embeddings.weight", (vocabulary, hidden)
    for number, kind in enumerate(_pattern(c)):
        layer = f"backbone.layers.{number}."
        mixer = layer + "mixer."
        yield layer + "norm.weight", (hidden,)
        if kind == "M":
            sizes = c["mamba_num_heads"], c["mamba_head_dim"], c["ssm_state_size"], c["n_groups"]
            yield from _mamba(mixer, hidden, *sizes)
        elif kind == "*":
            dim = c.get("head_dim") or c["attention_head_dim"]
            heads = c["num_attention_heads"], c["num_key_value_heads"]
            yield from _attention(mixer, hidden, dim, *heads)
        elif kind == "-":
            yield from _up_down(mixer, hidden, c["intermediate_size"])
        else:
            experts = c["n_routed_experts"]
            yield mixer + "gate.weight", (experts, hidden)
            yield mixer + "gate.e_score_correction_bias", (experts,)
            for expert in range(experts):
                yield from _up_down(f"{mixer}experts.{expert}.", hidden, c["moe_intermediate_size"])
            shared = c["moe_shared_expert_intermediate_size"]
            yield from _up_down(mixer + "shared_experts.", hidden, shared)
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _pattern(c: dict[str, Any]) -> str:
    by_name = {name: kind for kind, name in BY_NAME.items()}
    return c.get("hybrid_override_pattern") or "".join(by_name[n] for n in c["layers_block_type"])


def _granite(c: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, units = c["hidden_size"], c["shared_intermediate_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for number, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{number}."
        yield layer + "input_layernorm.weight", (hidden,)
        if kind == "mamba":
            sizes = c["mamba_n_heads"], c["mamba_d_head"], c["mamba_d_state"], c["mamba_n_groups"]
            yield from _mamba(layer + "mamba.", hidden, *sizes)
        else:
            heads = c["num_attention_heads"], c["num_key_value_heads"]
            yield from _attention(layer + "self_attn.", hidden, hidden // heads[0], *heads)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "shared_mlp.input_linear.weight", (2 * units, hidden)
        yield layer + "shared_mlp.output_linear.weight", (hidden, units)
    yield "model.norm.weight", (hidden,)


def _mamba(
    prefix: str, hidden: int, heads: int, dim: int, state: int, groups: int
) -> Iterator[tuple[str, Shape]]:
    inner, shared = heads * dim, 2 * groups * state
    yield prefix + "in_proj.weight", (2 * inner + shared + heads, hidden)
    yield prefix + "conv1d.weight", (inner + shared, 1, 4)
    yield prefix + "conv1d.bias", (inner + shared,)
    for name in ("A_log", "D", "dt_bias"):
        yield prefix + name, (heads,)
    yield prefix + "norm.weight", (inner,)
    yield prefix + "out_proj.weight", (hidden, inner)


def _attention(
    prefix: str, hidden: int, dim: int, heads: int, groups: int
) -> Iterator[tuple[str, Shape]]:
    for name, count in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{prefix}{name}_proj.weight", (count * dim, hidden)
    yield prefix + "o_proj.weight", (hidden, heads * dim)


def _up_down(prefix: str, hidden: int, units: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "up_proj.weight", (units, hidden)
    yield prefix + "down_proj.weight", (hidden, units)


_NOISE = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def values_of(name: str, shape: Shape) -> Tensor:
    """bfloat16 values of a tensor, by its name: like a trained model's in size."""
    count = math.prod(shape)
    noise = _NOISE[crc32(name.encode()) % (len(_NOISE) // 2) :]
    values = noise.repeat(-(-count // len(noise)))[:count].view(shape)
    if name.endswith(("norm.weight", "norm_f.weight", ".D")):
        return 1 + values
    if name.endswith("A_log"):
        return (1 + 700 * values.abs()).log()
    return 10 * values if "conv1d" in name or name.endswith("dt_bias") else values


def write_folder(
    config: dict[str, Any],
    folder: Path,
    shard_bytes: int = 5 * 10**9,
    values: Callable[[str, Shape], Tensor | None] | None = None,
) -> Path:
    """Write a folder with `config`'s `published_tensors` in bfloat16, in shards with an index.
    `values` gives a tensor by name and shape, or its first rows; None, or fewer rows: a hole there,
    which reads as zeros. Without it there are holes everywhere."""
    folder.mkdir(parents=True)
    shards: list[dict[str, Shape]] = [{}]
    tensors, size = published_tensors(config), 0
    for name, shape in tensors.items():
        if shards[-1] and size + 2 * math.prod(shape) > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        _write_shard(folder / file, shard, values)
    total = sum(2 * math.prod(shape) for shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_shard(
    file: Path, shard: dict[str, Shape], values: Callable[[str, Shape], Tensor | None] | None
) -> None:
    """The format (safetensors' documentation): the header's length, the header, the numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        first = stream.tell()
        for name, shape in shard.items():
            found = None if values is None else values(name, shape)
            if found is not None:
                stream.seek(first + header[name]["data_offsets"][0])
                stream.write(found.view(torch.uint8).numpy().data)
        stream.truncate(first + end)
