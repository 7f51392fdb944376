"""GGUF files of Hugging Face folders, as llama.cpp's converter writes them.

Names are those of the gguf package (`get_tensor_name_map`); what is done to values is what
llama.cpp's `conversion/` does: `llama.py`, `qwen.py`, `mamba.py`, `granite.py`, `nemotron.py`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from megatron_async.models.architecture import ModelArchitecture
from tests.support.gguf_blocks import blocks_of

Q = gguf.GGMLQuantizationType
type Quantisation = gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType]
KINDS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to the q and k rows of a Llama or Granite model."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, 2, dim // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def stacked(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts in one tensor for each matrix."""
    found, experts = {}, defaultdict(list)
    for name in sorted(state, key=lambda n: [int(part) for part in re.findall(r"\d+", n)]):
        if match := re.search(r"experts\.\d+\.", name):
            whole = name[: match.start()] + "experts." + name[match.end() :]
            whole = whole.replace("block_sparse_moe.experts", "mlp.experts")
            for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                whole = whole.replace(theirs, ours)
            experts[whole.replace("backbone", "model").replace("mixer", "mlp")].append(state[name])
        else:
            found[name] = state[name]
    return found | {name: np.stack(parts) for name, parts in experts.items()}


def converted(
    state: Mapping[str, np.ndarray], kind: str, a: ModelArchitecture
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file, by their names there."""
    names = gguf.get_tensor_name_map(KINDS[kind], a.num_layers)

    def named(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    for name, values in stacked(state).items():
        layer = re.search(r"layers\.(\d+)\.", name)
        block = f"blk.{layer[1]}." if layer else ""
        if name.endswith("input_linear.weight"):
            end = "_shexp" if "shared" in name else "_exps"
            end = end if a.num_moe_experts else ""
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
                yield f"{block}ffn_{part}{end}.weight", half
        elif name.endswith("shared_mlp.output_linear.weight") and not a.num_moe_experts:
            yield f"{block}ffn_down.weight", values
        elif name.endswith(".A_log"):
            yield named(name), -np.exp(values)[:, None]
        elif name.endswith(".D"):
            yield named(name), values[:, None]
        elif name.endswith("dt_bias"):
            yield named(name.replace("dt_bias", "dt_proj.bias")), values
        elif name.endswith("e_score_correction_bias"):
            yield named(name.replace("_bias", ".bias")), values
        elif name.endswith("conv1d.weight"):
            yield named(name), values.squeeze(1)
        elif re.search(r"(mamba|mixer)\.norm\.weight", name):
            yield named(name), values.reshape(a.mamba_num_groups, -1)
        elif name.endswith("shared_expert_gate.weight"):
            yield named(name), values.squeeze(0)
        elif name.endswith(("q_proj.weight", "k_proj.weight")) and "qwen" not in kind:
            heads = a.num_attention_heads if "q_proj" in name else a.num_query_groups
            yield named(name), permute(values, heads)
        else:
            yield named(name), values


def metadata_of(kind: str, a: ModelArchitecture) -> dict[str, Any]:
    """What such a file says of an architecture."""
    values: dict[str, Any] = {
        "block_count": a.num_layers,
        "context_length": a.max_position_embeddings,
        "embedding_length": a.hidden_size,
        "feed_forward_length": a.ffn_hidden_size or a.moe_ffn_hidden_size,
        "attention.head_count": a.num_attention_heads,
        "attention.head_count_kv": a.num_query_groups,
        "attention.key_length": a.kv_channels,
        "attention.layer_norm_rms_epsilon": a.layernorm_epsilon,
        "rope.freq_base": a.rotary_base,
    }
    if a.num_moe_experts:
        values |= {
            "expert_count": a.num_moe_experts,
            "expert_used_count": a.moe_router_topk,
            "expert_feed_forward_length": a.moe_ffn_hidden_size,
        }
    if a.moe_shared_expert_intermediate_size:
        values["expert_shared_feed_forward_length"] = a.moe_shared_expert_intermediate_size
    mixers, feeds = a.pattern[:: a.layers_per_block], a.pattern[a.layers_per_block - 1 :]
    if "M" in a.pattern:
        kv = [a.num_query_groups * (kind == "*") for kind in mixers]
        values |= {
            "attention.head_count_kv": kv,
            "ssm.conv_kernel": 4,
            "ssm.state_size": a.mamba_state_dim,
            "ssm.group_count": a.mamba_num_groups,
            "ssm.inner_size": a.mamba.channels,
            "ssm.time_step_rank": a.mamba_num_heads,
        }
    if kind.startswith("granite"):
        values |= {
            "attention.scale": a.attention_multiplier,
            "embedding_scale": a.embedding_multiplier,
            "residual_scale": a.residual_multiplier,
            "logit_scale": a.logits_scaling,
            "rope.scaling.finetuned": a.position_embedding_type == "rope",
        }
        if a.num_moe_experts:
            values["feed_forward_length"] = a.moe_ffn_hidden_size
            del values["expert_feed_forward_length"]
    if kind.startswith("nemotron"):
        units = a.moe_ffn_hidden_size or a.ffn_hidden_size
        values |= {
            "feed_forward_length": [units * (kind in "-E") for kind in feeds],
            "attention.value_length": a.kv_channels,
            "rope.dimension_count": a.hidden_size // a.num_attention_heads,
        }
        if a.num_moe_experts:
            values |= {
                "expert_shared_count": 1,
                "expert_weights_norm": True,
                "expert_weights_scale": a.moe_router_topk_scaling_factor,
                "expert_group_count": 1,
            }
    whole = {f"{kind}.{key}": value for key, value in values.items()}
    return whole | {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A value of a type that follows from Python's; None: none."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_string(key, value)


def write_gguf(
    path: Path,
    folder: Path,
    kind: str,
    a: ModelArchitecture,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    quantisation: Quantisation = Q.F32,
) -> Path:
    """A GGUF file of a folder's weights; `fields` and `tensors` replace or (None) drop some.
    `quantisation`: of matrices, or by their names; of a K type they are random."""
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (metadata_of(kind, a) | dict(fields or {})).items():
        add_field(writer, key, value)
    state = {n: t.numpy() for n, t in load_file(folder / "model.safetensors").items()}
    stored: dict[str, np.ndarray | None] = dict(converted(state, kind, a))
    for name, rows in (stored | dict(tensors or {})).items():
        if rows is None:
            continue
        chosen = quantisation(name) if callable(quantisation) else quantisation
        # The converter keeps these in float32.
        is_small = any(
            part in name for part in ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "_inp")
        )
        if rows.ndim < 2 or is_small or chosen == Q.F32 or rows.shape[-1] % 32:
            writer.add_tensor(name, np.ascontiguousarray(rows))
        elif chosen.name.endswith("_K"):
            data = blocks_of(chosen, rows.size // rows.shape[-1], rows.shape[-1], seed=len(name))
            writer.add_tensor(name, data.reshape(*rows.shape[:-1], -1), raw_dtype=chosen)
        else:
            writer.add_tensor(name, gguf.quants.quantize(rows, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
