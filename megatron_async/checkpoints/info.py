"""What a model is and how much memory it needs, without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.kept_blocks import settle_quantization
from megatron_async.checkpoints.quantised import QuantisedFolder
from megatron_async.checkpoints.quantised_model import Kept
from megatron_async.checkpoints.registry import open_model
from megatron_async.checkpoints.source import ModelSource, cache_dtype, parse_dtype
from megatron_async.config import InferenceConfig
from megatron_async.device_state.cache_layout import (
    BlockNeeds,
    cache_layout,
    default_block_size,
)
from megatron_async.devices import make_device, resolve_device_name
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.models.architecture import (
    ATTENTION,
    KINDS,
    LINEAR,
    LLAMA3,
    MLP,
    RECURRENT,
    YARN,
    ModelArchitecture,
)
from megatron_async.models.sizes import SIZES_OF
from megatron_async.ops.batch_dimensions import BatchDimensions

if TYPE_CHECKING:
    from megatron_async.models.model_config import ModelConfig
    from megatron_async.models.parallel_state import ParallelSizes

GIB = 1024**3
TOKEN_ID_BYTES = 4
"""Bytes of a token id beside the keys, which the prefix cache reads
(`PagedKVCache.block_tokens`)."""


@dataclass(frozen=True)
class ModelInfo:
    """A model's needs on one device. Plain values only, so that `dataclasses.asdict` is JSON."""

    name: str
    format: str
    architecture: ModelArchitecture
    stored_dtype: str
    dtype: str
    """Dtype of the weights once loaded."""
    device: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Over all layers; 0 for a model without attention."""
    state_bytes_per_request: int
    """Bytes of recurrent layers for a request of any length: the states, and the inputs that are
    not in the states yet. With the engine's default settings."""
    block_size_tokens: int
    kv_bytes_per_block: int
    """With the token ids beside the keys, for prefix caching. In a model with windows a block is of
    some layers."""
    free_bytes: int
    """Memory before the weights are loaded: what is free on the device, or what was asked about."""
    kv_blocks: int
    """Usable blocks of the largest KV pool that fits beside the weights and the recurrent state of
    one request; 0 if none does, and without attention."""
    mtp_parameters: int
    """Weights of multi-token prediction, which is loaded for speculative_method="mtp" alone: this
    and the next two are in none of the other numbers. 0: the model has none."""
    mtp_weight_bytes: int
    mtp_kv_bytes_per_token: int
    has_mtp_weights: bool
    """Whether the weights of multi-token prediction are there, where the model has it."""
    state_requests: int
    """Requests whose recurrent states fit beside the weights and a KV pool of one block: the
    largest `max_requests`; 0 if none does, and without recurrent layers."""

    kv_cache_dtype: str = "model"
    """Dtype of keys and values: "fp8", or "model": the dtype of the weights."""
    keeps_blocks: bool = False
    """Whether `weight_bytes` are a GGUF file's blocks, as an engine has them by default."""

    window_kv_bytes_per_token: int = 0
    """Part of `kv_bytes_per_token` in layers with a window, which keep the window's last tokens."""

    quantised: QuantisedFolder | None = None
    """What is quantised in the files; None: nothing, or the format has its own words."""

    @property
    def fits(self) -> bool:
        """Whether weights, the state of one request and a pool of at least one block fit."""
        if self.state_bytes_per_request:
            return self.state_requests > 0
        if self.kv_bytes_per_token:
            return self.kv_blocks > 0
        return self.weight_bytes <= self.free_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the largest KV pool holds of one sequence, where layers have windows no more
        than the model's positions."""
        a, size = self.architecture, self.block_size_tokens
        if not any(a.attention_windows):
            return self.kv_blocks * size
        needs = BlockNeeds(cache_layout([a.attention_windows]).windows, size)
        return needs.longest(self.kv_blocks, -(-a.max_position_embeddings // size)) * size


def model_info(
    source: str | Path | ModelSource,
    device: str | None = "cpu",
    dtype: str | torch.dtype | None = None,
    block_size_tokens: int | None = None,
    memory_gb: float | None = None,
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
) -> ModelInfo:
    """Describe a model from its configuration.

    Args:
        source: what `open_model` takes, or what it gave.
        device: "cpu", "cuda" or "cuda:N"; None: a GPU where there is one.
        dtype: of the weights; None: float32 on the CPU, bfloat16 on a GPU.
        block_size_tokens: tokens in a KV block; None: as an engine's default.
        memory_gb: plan for a device with so many GiB free (it need not be here); None: ask the
            device.
        kv_cache_dtype: "fp8", "model" (as the weights) or "auto" (what the model's files say).
        quantization: as `InferenceConfig` has it.

    Raises:
        CheckpointError: see `open_model`; a size that is not positive.
        ConfigurationError: a device that is unknown or not there.
    """
    if block_size_tokens is not None and block_size_tokens < 1:
        raise CheckpointError(f"block_size_tokens = {block_size_tokens} must be at least 1")
    if memory_gb is not None and not memory_gb > 0:
        raise CheckpointError(f"memory_gb = {memory_gb} must be a positive number")
    source = source if isinstance(source, ModelSource) else open_model(source)
    if memory_gb is None or device is None:
        device = resolve_device_name(device)
    resolved = parse_dtype(dtype or ("float32" if device.startswith("cpu") else "bfloat16"))
    free = _free_memory(device) if memory_gb is None else int(memory_gb * GIB)
    architecture = source.architecture
    settings, total = {"quantization": quantization}, None
    kept = Kept.on(device, settings, source, capability=(0, 0), dtype=resolved)
    if kept.quantization is None:
        total = settle_quantization(settings, source, device, resolved)
    keeps_blocks = total is not None
    if total is None:
        total = kept.num_bytes(resolved)
    asked = InferenceConfig(device="cpu", kv_cache_dtype=kv_cache_dtype).kv_cache_dtype
    cache = cache_dtype(asked, source)
    itemsize = 1 if cache == "fp8" else resolved.itemsize
    per_token = architecture.kv_bytes_per_token(itemsize)
    windows = architecture.attention_windows
    block_size_tokens = block_size_tokens or default_block_size(
        windows, InferenceConfig.block_size_tokens
    )
    layers = cache_layout([windows]).layers
    of_layers = per_token // max(len(windows), 1) * layers
    per_block = (of_layers + TOKEN_ID_BYTES) * block_size_tokens if per_token else 0
    state = _state_bytes(architecture, resolved)
    # One block and one state more are allocated: for rows without a request.
    left = free - total
    blocks = max((left - 2 * state) // per_block - 1, 0) if per_block else 0
    requests = max((left - 2 * per_block) // state - 1, 0) if state else 0
    return ModelInfo(
        name=source.name,
        format=source.format,
        architecture=architecture,
        stored_dtype=_dtype_name(source.dtype),
        dtype=_dtype_name(resolved),
        device=device,
        parameters=architecture.num_parameters,
        weight_bytes=total,
        kv_bytes_per_token=per_token,
        state_bytes_per_request=state,
        block_size_tokens=block_size_tokens,
        kv_bytes_per_block=per_block,
        free_bytes=free,
        kv_blocks=blocks,
        mtp_parameters=architecture.mtp_parameters,
        mtp_weight_bytes=architecture.mtp_parameters * resolved.itemsize,
        mtp_kv_bytes_per_token=architecture.mtp_kv_bytes_per_token(itemsize),
        has_mtp_weights=source.has_mtp_weights,
        state_requests=requests,
        kv_cache_dtype=cache,
        keeps_blocks=keeps_blocks,
        window_kv_bytes_per_token=architecture.window_kv_bytes_per_token(itemsize),
        quantised=source.quantised,
    )


def format_info(info: ModelInfo) -> str:
    """A short table, one line a fact."""
    a = info.architecture
    features = [
        name
        for name, present in (
            ("tied embeddings", a.tie_word_embeddings),
            ("biases", a.add_bias_linear),
            ("qkv biases", a.add_qkv_bias and not a.add_bias_linear),
            ("attention sinks", a.softmax_type != "vanilla"),
            ("norms behind layers", a.has_post_norms),
            ("q/k norm", a.qk_layernorm),
            ("gated attention", a.attention_output_gate),
            ("zero-centred norms", a.layernorm_zero_centered_gamma),
            ("gated shared expert", a.moe_shared_expert_gate),
            *_scaling(a),
            (f"sliding window {a.sliding_window}", a.sliding_window is not None),
        )
        if present
    ]
    pool = "does not fit: use a smaller dtype, a smaller model or more memory"
    if info.fits and info.kv_bytes_per_token:
        pool = f"{info.kv_blocks:,} blocks = {info.kv_tokens:,} tokens"
        if info.window_kv_bytes_per_token:
            pool = f"{info.kv_blocks:,} blocks, for {info.kv_tokens:,} tokens of one request"
    elif info.fits:
        pool = "none: no layer has attention"
    rows = {
        "model": f"{info.name} ({info.format}, stored as {info.stored_dtype})",
        "architecture": f"{a.model_type}, {a.num_layers} layers, hidden {a.hidden_size}"
        + (f", ffn {a.ffn_hidden_size}" if a.ffn_hidden_size else ""),
        **_attention_rows(a),
        **_recurrent_rows(a, info),
        **_expert_rows(a),
        "features": ", ".join(features) or "none beyond the family's",
        "vocabulary": f"{a.vocab_size:,}",
        "context": f"{a.max_position_embeddings:,} tokens",
        "parameters": f"{info.parameters:,}"
        + (f", of which a token meets {a.num_active_parameters:,}" if a.num_moe_experts else ""),
        **_quantised_rows(info.quantised),
        _weights_row(info): _size(info.weight_bytes),
        _cache_row(info): f"{_size(info.kv_bytes_per_token)} a token{_window_part(a, info)}, "
        f"{_size(info.kv_bytes_per_block)} a block of {info.block_size_tokens}",
        **_mtp_rows(a, info),
        f"memory, {info.device}": f"{_size(info.free_bytes)} free",
        "KV pool that fits": pool,
    }
    if info.state_bytes_per_request and info.fits:
        rows["states that fit"] = f"of {info.state_requests:,} requests (max_requests)"
        if info.kv_bytes_per_token:
            rows["KV pool that fits"] += ", beside the state of one request"
            rows["states that fit"] += ", beside a KV pool of one block"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _cache_row(info: ModelInfo) -> str:
    return "KV cache, fp8" if info.kv_cache_dtype == "fp8" else "KV cache"


def _window_part(a: ModelArchitecture, info: ModelInfo) -> str:
    if not info.window_kv_bytes_per_token:
        return ""
    part, layers = _size(info.window_kv_bytes_per_token), sum(map(bool, a.attention_windows))
    return f" ({part} of it in {layers} layers that keep the last {a.sliding_window:,})"


def _weights_row(info: ModelInfo) -> str:
    if info.keeps_blocks:
        return "weights, kept as blocks"
    whole = info.parameters * parse_dtype(info.dtype).itemsize
    return f"weights, {info.dtype}" + (" or as in the files" if info.weight_bytes < whole else "")


def _quantised_rows(found: QuantisedFolder | None) -> dict[str, str]:
    if found is None:
        return {}
    bits = f"{found.bits:.3g} bits a weight with its scales"
    rows = {
        "quantised": found.formats and f"{found.method}: {found.formats}, {bits}",
        "weights, in the files": _size(found.stored_bytes),
        "keys and values in fp8": found.cache,
        "not as in the files": "; ".join(found.not_served),
    }
    return {name: row for name, row in rows.items() if row}


def _scaling(a: ModelArchitecture) -> list[tuple[str, bool]]:
    scaling = a.rope_scaling
    if scaling is None:
        return []
    return [
        ("Llama-3 rope scaling", scaling.kind == LLAMA3),
        (f"rope scaled by {scaling.factor:g}", scaling.kind == LINEAR),
        (f"YaRN by {scaling.factor:g}", scaling.kind == YARN),
    ]


def _attention_rows(a: ModelArchitecture) -> dict[str, str]:
    if not a.count(ATTENTION):
        return {}
    positions = "no positions"
    if a.position_embedding_type == "rope":
        positions = f"rope base {a.rotary_base:g}"
        if a.rotary_percent != 1:
            positions += f" on {a.rotary_percent:g} of a head"
    layers = f"in {a.count(ATTENTION)} layers, " if a.count(RECURRENT) else ""
    heads = f"{a.num_attention_heads} heads, {a.num_query_groups} KV heads"
    return {"attention": f"{layers}{heads}, head size {a.kv_channels}, {positions}"}


def _recurrent_rows(a: ModelArchitecture, info: ModelInfo) -> dict[str, str]:
    if not a.count(RECURRENT):
        return {}
    rows = {"pattern": a.pattern}
    for kind in RECURRENT:
        if a.count(kind):
            rows[KINDS[kind]] = f"in {a.count(kind)} layers, {SIZES_OF[kind].of(a)}"
    return rows | {"recurrent state": _state_row(info)}


def _mtp_rows(a: ModelArchitecture, info: ModelInfo) -> dict[str, str]:
    if not a.mtp_pattern:
        return {}
    depths = f"{a.mtp_num_depths} depth{'s' if a.mtp_num_depths > 1 else ''} of {a.mtp_pattern}"
    if a.mtp_use_repeated_layer:
        depths += ", to be repeated"
    sizes = (
        f"{info.mtp_parameters:,} parameters, {_size(info.mtp_weight_bytes)}, KV cache "
        f"{_size(info.mtp_kv_bytes_per_token)} a token: only with speculative_method='mtp'"
    )
    if not info.has_mtp_weights:
        sizes = "its weights are not there"
    return {"multi-token prediction": f"{depths}; {sizes}"}


def _state_row(info: ModelInfo) -> str:
    row = f"{_size(info.state_bytes_per_request)} a request"
    if info.kv_bytes_per_token:
        tokens = info.state_bytes_per_request / info.kv_bytes_per_token
        row += f", as much as {tokens:,.0f} tokens of KV cache"
    return row


def _state_bytes(architecture: ModelArchitecture, dtype: torch.dtype) -> int:
    """Bytes of one request's recurrent states."""
    layers = "".join(kind for kind in architecture.pattern if kind in RECURRENT)
    if not layers:
        return 0
    # Imported here because the engine's memory takes seconds to import.
    from megatron_async.config import InferenceConfig
    from megatron_async.device_state.recurrent_state import make_recurrent_state
    from megatron_async.models.partition import recurrent_sizes

    sizes, nowhere = recurrent_sizes(architecture, layers), torch.device("meta")
    return make_recurrent_state(sizes, InferenceConfig(), dtype, nowhere).bytes_per_slot


def _expert_rows(a: ModelArchitecture) -> dict[str, str]:
    if not a.num_moe_experts:
        return {}
    experts = f"{a.num_moe_experts}, {a.moe_router_topk} a token, ffn {a.moe_ffn_hidden_size}"
    if a.moe_shared_expert_intermediate_size:
        experts += f", one for all of {a.moe_shared_expert_intermediate_size}"
    dense = [str(n // a.layers_per_block) for n, kind in enumerate(a.pattern) if kind == MLP]
    return {"experts": experts + (f", layers {', '.join(dense)} dense" if dense else "")}


def model_program(
    source: str | Path | ModelSource,
    rows: int,
    tokens: int,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    major: int | None = None,
    gpu: str | None = None,
    is_invariant: bool = False,
    quantization: str | None = None,
) -> list[str]:
    """Which kernels each layer of a model launches in a step: a line each, on one rank.

    Args:
        source: what `open_model` takes, or what it gave.
        rows: rows that decode one token each.
        tokens: of the step: those beyond the rows' are of one prompt.
        device: as for `model_info`; not asked for where `major` is given.
        dtype: of the weights; None: bfloat16 on a GPU, else float32.
        major: compute capability of the GPU whose rules count; None: of the device.
        gpu: a word of its name, for choices by time that are known; None: the device's whole name.
        is_invariant: with `batch_invariant_mode`.
        quantization: "file" or "fp8", as `InferenceConfig` has it.

    Raises:
        ConfigurationError: fewer tokens than rows, or none; a device that is unknown or not there;
            with `is_invariant` see `layer_program`.
    """
    from megatron_async.models.hybrid import build_model
    from megatron_async.models.layer_program import layer_program
    from megatron_async.ops.linear.products import MEASURED_MAJOR

    if not 0 <= rows <= tokens or not tokens:
        raise ConfigurationError(
            f"rows={rows} and tokens={tokens}: a step has a token for each row, and at least one."
        )
    if major is None:
        here = torch.device(resolve_device_name(device))
        major, gpu = 0, None
        if here.type == "cuda":
            major, gpu = torch.cuda.get_device_capability(here)[0], torch.cuda.get_device_name(here)
    source = source if isinstance(source, ModelSource) else open_model(source)
    resolved = parse_dtype(dtype or ("bfloat16" if major else "float32"))
    settings = {"quantization": quantization, "batch_invariant_mode": is_invariant}
    device = "cuda" if major else "cpu"
    kept = Kept.on(device, settings, source, capability=(major, 0), dtype=resolved)
    nowhere = torch.device("meta")
    model = build_model(source.architecture, resolved, nowhere, layouts=kept.of_model)
    prompt = ((tokens - rows, tokens - rows),) if tokens > rows else ()
    dims = BatchDimensions(rows, prefill_lengths=prompt)
    lines = layer_program(model, dims, major, is_invariant)
    place = f"a GPU of compute capability {major}" if major else "a CPU"
    if major and major != MEASURED_MAJOR:
        place += f", where nothing was measured (it was on {MEASURED_MAJOR})"
    elif not major:
        place += ", whose products may have packed or 8-bit weights where memory allows"
    shape = f"rows {rows}, tokens {tokens}{', batch_invariant_mode' if is_invariant else ''}"
    chosen = [] if gpu is None else _choices_lines(model.config, gpu)
    return [f"{source.name}, {_dtype_name(resolved)}, {shape}, on {place}", *lines, *chosen]


def _choices_lines(model: ModelConfig, gpu: str) -> list[str]:
    """The rows of `Choices` for a model on one rank, whatever the settings of an engine."""
    from megatron_async.choices import known_rows, versions
    from megatron_async.models.model_config import DECIDING_TIMES

    facts = {name: getattr(model, name, None) for name in DECIDING_TIMES}
    facts |= {"dtype": _dtype_name(model.params_dtype), "vocab": model.vocab_size}
    lines = [
        f"{row.kind}, {row.gpu} ({source}): {json.dumps(row.value)} for "
        + json.dumps({name: row.shape[name] for name in row.shape if name not in facts})
        + ("" if row.versions == versions() else f" with {json.dumps(row.versions)}")
        for row, source in known_rows(gpu)
        if all(facts.get(name, fact) == fact for name, fact in row.shape.items())
    ]
    return lines or [
        f"no choice by time is known for {gpu}: the first start measures it, or `tune`; a rule "
        "chooses with choices='shipped'"
    ]


def _free_memory(device: str) -> int:
    opened = make_device(device)
    try:
        return opened.free_memory()
    finally:
        opened.close()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def check_weights_fit(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    sizes: ParallelSizes,
    free: int,
    kept_bytes: int | None = None,
    is_quantised: bool = False,
) -> None:
    """Check that a rank's share of the weights fits into `free` bytes. Experts count as if all
    ranks of a job shared all weights evenly, so a model that passes may still be too large.
    `kept_bytes`: of all weights, where some are not in the dtype; `is_quantised`: the files hold
    quantised weights, which are decoded.

    Raises:
        OutOfMemoryError: they do not fit; the message has the figures and what helps.
    """
    ranks = (
        sizes.tensor_model_parallel * sizes.pipeline_model_parallel * sizes.expert_model_parallel
    )
    in_dtype = architecture.num_parameters * dtype.itemsize
    needed = (in_dtype if kept_bytes is None else kept_bytes) // ranks
    if needed <= free:
        return
    share = "the weights" if ranks == 1 else f"a rank's share of the weights (1 of {ranks})"
    name = str(dtype).removeprefix("torch.")
    half = ""
    if needed == in_dtype // ranks and dtype.itemsize > 2 and needed // 2 <= free:
        half = f" In bfloat16 (dtype='bfloat16') they take {needed / 2 / GIB:.3g} GiB."
    if is_quantised and kept_bytes is None:
        half += " quantization='file' keeps them on a GPU as the files have them."
    raise OutOfMemoryError(
        f"{share} take {needed / GIB:.3g} GiB in {name}, and {free / GIB:.3g} GiB of memory are "
        f"free.{half} Split the model over more ranks (tensor_model_parallel_size), or take a "
        "smaller one."
    )
