"""Engines in the bit-stable mode: on a GPU as they are, or with the ops of a GPU on a CPU, in
Triton's interpreter. There all is small that a sequence has several of, so that short ones do:
parts of keys and their tiles, tiles of a scan, borders of states."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import triton.language as tl

from megatron_async import DynamicInferenceEngine
from megatron_async.device_state import device_memory, state_table
from megatron_async.device_state.recurrences import MambaRecurrence
from megatron_async.devices import CpuDevice, Device, make_device
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.attention import decode_attention, prefill_schedule
from megatron_async.ops.attention.backends import own_kernel
from megatron_async.ops.attention.backends.base import INVARIANT_PART, AttentionShape
from megatron_async.ops.attention.backends.own_kernel import TritonPrefill
from megatron_async.ops.attention.backends.selection import PrefillChoice
from megatron_async.ops.attention.gpu_paged_attention import GpuPagedAttention
from megatron_async.ops.attention.prefill_schedule import PrefillSchedule
from megatron_async.ops.attention.prefill_tile import PROGRAMS_A_PROCESSOR, Tile
from megatron_async.ops.linear import products, tile
from megatron_async.ops.recurrent import (
    mamba_inputs,
    mamba_prefill,
    mamba_replay,
    prefill_parts,
    recurrent_pools,
)
from megatron_async.planning import dynamic_context
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import CPU, make_engine, make_model
from tests.unit_tests.ops.attention.decode_batch import processors
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

PART, KEYS, QUERIES, SCANNED, PROCESSORS = 32, 16, 64, 32, 4
"""In the interpreter: keys of a part, of a tile, queries of one, tokens of Mamba-2's, processors of
the GPU."""
PART_HERE = PART if INTERPRETED else INVARIANT_PART
QWEN = ModelArchitecture(
    "qwen3_moe", 3, 32, 4, 1, 16, 32, 64, qk_layernorm=True, pattern="*E*", num_moe_experts=4,
    moe_router_topk=3, moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=32,
    mtp_pattern="*-", mtp_num_depths=1,
)  # fmt: skip
ARCHITECTURES = {
    "qwen": QWEN,
    "nemotron": replace(
        QWEN, model_type="nemotron_h", pattern="M*-", qk_layernorm=False,
        activation="squared_relu", position_embedding_type="none", mamba_num_heads=4,
        mamba_head_dim=16, mamba_state_dim=16, mamba_num_groups=1, mtp_pattern="",
        mtp_num_depths=0,
    ),
    "next": replace(
        QWEN, model_type="qwen3_next", pattern="G*E", rotary_percent=0.5,
        attention_output_gate=True, layernorm_zero_centered_gamma=True,
        moe_shared_expert_gate=True, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, mtp_pattern="", mtp_num_depths=0,
    ),
    "windows": replace(
        QWEN, model_type="llama", num_layers=2, pattern="*-*-", qk_layernorm=False,
        num_moe_experts=0, moe_shared_expert_intermediate_size=0, mtp_pattern="", mtp_num_depths=0,
        sliding_window=24, window_attn_skip_freq=(1, 0), softmax_type="learnable",
    ),
}  # fmt: skip
if not INTERPRETED:  # as wide as kernels of real models want
    wide = {"hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 64}
    wide |= {"vocab_size": 1024, "ffn_hidden_size": 1024, "num_moe_experts": 16}
    wide |= {"mamba_num_heads": 16, "mamba_head_dim": 64, "mamba_state_dim": 128}
    wide |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        wide[name] = 256
    ARCHITECTURES = {name: replace(each, **wide) for name, each in ARCHITECTURES.items()}
VOCABULARY = ARCHITECTURES["qwen"].vocab_size


def use_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made later on a CPU have the ops and the attention of a GPU."""
    ops = Ops(CPU, frozenset({"invariant"}), "gpu")
    ops.major, product, change = 9, ops.product, monkeypatch.setattr

    def product_of_rows(x: Any, *rest: Any, **named: Any) -> Any:
        # Hidden states have an axis that a GPU's caller drops.
        if isinstance(x, torch.Tensor) and x.dim() == 3:
            return product(x.flatten(0, 1), *rest, **named).unflatten(0, x.shape[:2])
        return product(x, *rest, **named)

    ops.product = product_of_rows
    change(device_memory, "Ops", lambda *_: ops)
    change(device_memory, "check_batch_invariance", lambda *_: None)
    change(device_memory, "_make_attention", _make_attention)
    change(products, "choose_for", partial(products.choose_for, major=9))
    change(tile, "PROCESSORS", 1)  # few programs
    change(decode_attention, "decode_tile", lambda _dim: KEYS)
    change(own_kernel, "tile_of", lambda *_, **__: Tile(QUERIES, KEYS, 2, programs=2))
    change(prefill_schedule, "LEAST_KEYS", PART)
    for module in (mamba_replay, mamba_inputs):
        change(module, "TILE", SCANNED)
    change(mamba_prefill, "scan_tile", lambda *_: prefill_parts.Tile(SCANNED, 16, 4, 2))
    change(MambaRecurrence, "tile", SCANNED)
    for module in (dynamic_context, state_table, recurrent_pools):
        change(module, "GRID", SCANNED)
    for module in (prefill_parts, mamba_prefill):
        change(module, "BORDERS", tl.constexpr(SCANNED))


def _make_attention(
    model: Any, config: Any, device: Device, max_blocks: int, choices: Any, first_key: int = 0,
    window: int = 0,
) -> GpuPagedAttention:  # fmt: skip
    heads, groups, dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    sizes = heads, groups, dim, config.block_size_tokens, max_blocks
    shape = AttentionShape(
        *sizes, model.params_dtype, CPU, PART, config.has_fp8_cache, window,
        has_sinks=model.softmax_type != "vanilla",
    )  # fmt: skip
    prefill = TritonPrefill(shape, first_key)
    if not first_key and not window:  # off a GPU it would divide no keys
        divided = PROCESSORS, PROGRAMS_A_PROCESSOR, PART
        schedule = PrefillSchedule(groups, heads // groups, QUERIES, dim, CPU, *divided)
        prefill._schedules = {QUERIES: schedule}
    rows = config.max_rows if first_key else config.max_requests
    with processors(PROCESSORS):
        choice = PrefillChoice.of_one(prefill)
        return GpuPagedAttention(shape, rows, choice, config.decode_width, first_key)


def make_weights(architecture: ModelArchitecture, seed: int = 0) -> torch.nn.Module:
    """A 16-bit model. float16 overflows soon: what a convolution gives is small."""
    device, dtype = (CPU, torch.float16) if INTERPRETED else (torch.device("cuda"), torch.bfloat16)
    model = make_model(architecture, device, seed, with_mtp=architecture.mtp_num_depths > 0)
    for name, weight in model.named_parameters():
        if "conv1d" in name:
            weight.data *= 0.25
    model.to(dtype).config.params_dtype = dtype
    for module in model.modules():
        for name in getattr(module, "float32_parameters", ()):
            if (kept := getattr(module, name)) is not None:
                kept.data = kept.data.float()
    return model


weights_of = cache(make_weights)


def make_stable_engine(
    architecture: ModelArchitecture, model: torch.nn.Module | None = None, **config: Any
) -> DynamicInferenceEngine:
    """An engine in the mode, of `model` or of weights that all such engines share."""
    device: Device | None = None if INTERPRETED else make_device("cuda")
    if INTERPRETED:  # padded steps, or as they come
        device = CapturingCpu() if config.get("num_cuda_graphs") else CpuDevice()
    settings = {"block_size_tokens": 16, "num_kv_blocks": 40, "max_requests": 4, **config}
    settings = {"max_tokens": 8 * PART_HERE, "batch_invariant_mode": True, **settings}
    return make_engine(model or weights_of(architecture), device=device, **settings)
