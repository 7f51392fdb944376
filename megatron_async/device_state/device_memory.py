"""Everything that a context allocates on its device, sized from the model and the settings."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.choices import Choices
from megatron_async.config import InferenceConfig
from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout, ring_words
from megatron_async.device_state.cache_layout import CacheLayout, cache_layout
from megatron_async.device_state.device_slots import DeviceSlots
from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.device_state.kv_cache import (
    GIB,
    MIB,
    BlockShape,
    PagedKVCache,
    RoutingShape,
    blocks_that_fit,
)
from megatron_async.device_state.pools import Pools
from megatron_async.device_state.recurrent_state import make_recurrent_state
from megatron_async.device_state.sampling_state import SamplingState
from megatron_async.device_state.slot_states import SlotStates
from megatron_async.device_state.state_table import StateSharing, words_of_states
from megatron_async.devices import Device
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.models.batch_invariance import check_batch_invariance
from megatron_async.models.partition import (
    is_recurrent,
    layer_windows,
    local_heads,
    mtp_kv_layers,
    recurrent_layers,
    recurrent_sizes,
    routed_layers,
)
from megatron_async.models.pipeline import stage_of
from megatron_async.models.rotary import RotaryTable
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.attention.backends.base import INVARIANT_PART, AttentionShape
from megatron_async.ops.attention.backends.own_kernel import TritonPrefill
from megatron_async.ops.attention.backends.selection import PrefillChoice, choose_prefill
from megatron_async.ops.attention.cpu.host_attention import HostPagedAttention
from megatron_async.ops.attention.decode_attention import HEAD_TILE, MAX_DIM
from megatron_async.ops.attention.gpu_paged_attention import GpuPagedAttention
from megatron_async.ops.attention.narrow_cache import check_narrow_cache
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.cpu.compiler import compiles
from megatron_async.ops.step_tensors import StepTensors
from megatron_async.ops.triton_folder import choose_triton_folder


def make_gpu_view(
    model: Any,
    config: InferenceConfig,
    device: Device,
    sharing: StateSharing | None = None,
    choices: Choices | None = None,
) -> ContextGPUView:
    """Allocate KV cache, per-slot state and bookkeeping buffer, and the view that spans them.

    Args:
        model: Megatron's `TransformerConfig`; a `HybridModel`'s carries `hybrid_layer_pattern`.
        config: settings of the engine.
        device: the device of all allocations.
        sharing: of recurrent states; None: each request has its slot's row.
        choices: of the engine; None: made here.

    Raises:
        OutOfMemoryError: the states of the slots do not fit, or the KV pool beside them.
        ConfigurationError: a shape that the device's kernels do not serve.
    """
    if config.batch_invariant_mode:
        check_batch_invariance(model, config, device.torch_device)
    max_blocks = -(-config.max_sequence_length // config.block_size_tokens)
    choices = choices or Choices(config.choices, device)
    # A simulation's device has no memory at all.
    keeps = config.enable_sleep_mode and device.torch_device.type != "meta"
    pools, states = Pools(device.torch_device, device if keeps else None), SlotStates()
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is not None and stage_of(model).is_last:
        states.append(SamplingState(config.max_requests, vocab_size, pools))
    if layers := recurrent_layers(model):
        sizes = recurrent_sizes(model, layers)
        where = device.torch_device
        states.append(
            make_recurrent_state(sizes, config, model.params_dtype, where, sharing, pools)
        )
    # What each slot takes comes first; blocks share what is left.
    num_blocks = _num_blocks(model, config, device, states)
    states.allocate()
    layout = _layout(model)
    _check_first_table(layout, config)
    tables = len(layout.windows)
    kv_cache = PagedKVCache(block_shape(model, config), num_blocks, pools, layout)
    slots = DeviceSlots(
        config.max_requests,
        tables * max_blocks,
        num_blocks,
        device.torch_device,
        config.num_speculative_tokens,
    )
    samples = config.steps_in_flight, config.max_rows, ring_words(config.decode_width)
    view = ContextGPUView(
        config,
        BookkeepingLayout.capacity(config.max_rows, config.max_tokens, num_blocks)
        + (words_of_states(config.max_rows, config.max_tokens) if sharing else 0),
        StepTensors.empty(
            config.max_rows,
            config.max_requests * config.decode_width + config.max_tokens,
            max_blocks,
            device.torch_device,
            config.max_sample_rows,
            tables,
        ),
        slots,
        kv_cache,
        RotaryTable.described(model, config.max_sequence_length, device.torch_device),
        model.layernorm_epsilon,
        tuple(
            _make_attention(model, config, device, max_blocks, choices, window=window)
            for window in layout.windows
        ),
        pools,
        states,
        device.host_buffer(math.prod(samples), torch.int32).view(samples),
        Ops(device.torch_device, frozenset({"invariant"} if config.batch_invariant_mode else ())),
        # Of each depth of an MTP drafter, whose first entry is at the place of the depth's number.
        tuple(
            _make_attention(model, config, device, max_blocks, choices, first_key=1 + depth)
            for depth in range(draft_depths(model, config))
        ),
    )
    device.fence()
    return view


def _num_blocks(model: Any, config: InferenceConfig, device: Device, states: SlotStates) -> int:
    """Usable KV blocks: as many as fit, beside the states of all slots, on every rank of the
    model."""
    failure, num_blocks, size = None, 0, block_shape(model, config).num_bytes
    wanted = config.num_kv_blocks
    if not attention_layers(model):
        wanted = wanted or blocks_for_all(config)  # of no keys and values: none is short
    try:
        free = _free_beside(states, config.max_requests, device)
        num_blocks = blocks_that_fit(size, free, device.torch_device, wanted, config.buffer_size_gb)
    except OutOfMemoryError as error:
        failure = error
    num_blocks = agree_on_least(num_blocks)
    if failure is not None:
        raise failure
    if num_blocks == 0:
        raise OutOfMemoryError(
            "the KV pool does not fit on another rank of this model, whose own error says what "
            "would: give all ranks less (num_kv_blocks or buffer_size_gb)."
        )
    return num_blocks


def _free_beside(states: SlotStates, max_requests: int, device: Device) -> int:
    """Free bytes of a device, less what the states will take.

    Raises:
        OutOfMemoryError: they do not fit.
    """
    free, needed, each = device.free_memory(), states.num_bytes(max_requests), states.bytes_per_slot
    if needed <= free:
        return free - needed
    snapshots = states.bytes_of_snapshots
    fit = (free - snapshots) // each - 1
    remedy = f"At most max_requests={fit} fits." if fit > 0 else "Not even one request's fits."
    beside = ""
    if snapshots:
        beside = f", and {snapshots / GIB:.3g} GiB for snapshots of states"
        remedy += " Or set num_state_snapshots or prefix_caching_mamba_gb lower."
    raise OutOfMemoryError(
        f"what max_requests={max_requests} requests need beside the KV cache takes "
        f"{needed / GIB:.3g} GiB on {device.torch_device}, {each / MIB:.3g} MiB each and one more "
        f"for padding{beside}, but {free / GIB:.3g} GiB is free. {remedy}"
    )


def max_paused_blocks(model: Any, config: InferenceConfig, num_blocks: int, device: Device) -> int:
    """Blocks that paused requests may hold: `paused_buffer_size_gb`, or the whole pool."""
    if config.paused_buffer_size_gb is None:
        return num_blocks
    size = block_shape(model, config).num_bytes
    blocks = int(config.paused_buffer_size_gb * GIB) // size if size else num_blocks
    return agree_on_least(blocks)


def agree_on_least(value: int) -> int:
    """The least of a number over all ranks that launch their steps together: the ranks of a model,
    and those that share its experts. For values that must be equal but that each rank measures by
    itself. All of these ranks call it, at the start of an engine."""
    # Groups are made by this module, and a simulation starts without importing it.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return value
    for group in (
        parallel_state.get_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    ):
        if dist.get_world_size(group) > 1:
            # Groups that a user's Megatron made may know NCCL alone, which wants device memory.
            takes_host = "cpu:" in dist.get_backend_config(group)
            device = "cpu" if takes_host else torch.cuda.current_device()
            number = torch.full((1,), value, dtype=torch.int64, device=device)
            dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
            value = int(number.item())  # sync-ok: no engine runs yet
    return value


def keeps_tokens(model: Any, config: InferenceConfig) -> bool:
    """Whether token ids are kept beside the keys: on the last pipeline stage, which samples, if
    requests may begin after cached blocks or the n-gram drafter looks tokens up."""
    reads_tokens = config.enable_prefix_caching or config.speculative_method == "ngram"
    return reads_tokens and stage_of(model).is_last


def block_shape(model: Any, config: InferenceConfig) -> BlockShape:
    """What one KV block holds of a model on one rank. Hidden states are those of an MTP drafter."""
    depths = draft_depths(model, config)
    return BlockShape(
        _layout(model).layers,
        config.block_size_tokens,
        local_heads(model)[1],
        model.kv_channels,
        model.params_dtype,
        keeps_tokens(model, config),
        int(model.hidden_size) if depths else 0,
        depths,
        _routing_shape(model) if config.enable_routing_replay else None,
        config.has_fp8_cache,
    )


def _routing_shape(model: Any) -> RoutingShape:
    """What a routing record holds of a token.

    Raises:
        ConfigurationError: there are no experts.
    """
    if not any(layers := routed_layers(model)):
        raise ConfigurationError(
            "enable_routing_replay=True (moe_enable_routing_replay of Megatron's model), but the "
            "model has no layers with experts: leave it out."
        )
    here = layers[stage_of(model).index]
    return RoutingShape(here, model.moe_router_topk, model.num_moe_experts)


def _layout(model: Any) -> CacheLayout:
    return cache_layout(layer_windows(model), stage_of(model).index)


def _check_first_table(layout: CacheLayout, config: InferenceConfig) -> None:
    """Refuse what reads data of whole sequences by the blocks of the first table, where these go
    back."""
    wants = {
        "speculative_method='ngram'": config.speculative_method == "ngram",
        "enable_routing_replay=True": config.enable_routing_replay,
    }
    for setting, is_wanted in wants.items():
        if is_wanted and layout.windows[0]:
            raise ConfigurationError(
                f"{setting} needs the blocks of whole sequences, and all layers of this model have "
                f"a window of {layout.windows[0]} keys, whose blocks go back: leave it out."
            )


def draft_depths(model: Any, config: InferenceConfig) -> int:
    """Depths of multi-token prediction that draft: no more than there are drafts; 0: none does."""
    if config.speculative_method != "mtp":
        return 0
    built = getattr(model, "mtp_num_depths", 1)
    return max(1, min(built, config.num_speculative_tokens))


def attention_layers(model: Any) -> int:
    """Layers with a KV cache on this pipeline stage: those marked `*` in a hybrid pattern, or
    all; and those of multi-token prediction, where it is built."""
    if getattr(model, "hybrid_layer_pattern", None) is None:
        return int(model.num_layers)
    return stage_of(model).pattern.count("*") + mtp_kv_layers(model)


def blocks_for_all(config: InferenceConfig) -> int:
    """KV blocks of `max_requests` sequences that are as long as can be."""
    return config.max_requests * -(-config.max_sequence_length // config.block_size_tokens)


def _make_attention(
    model: Any,
    config: InferenceConfig,
    device: Device,
    max_blocks: int,
    choices: Choices,
    first_key: int = 0,
    window: int = 0,
) -> TorchPagedAttention:
    softcap = getattr(model, "attn_logit_softcapping", None) or 0.0
    if device.torch_device.type in ("cpu", "meta"):  # meta: no memory, no model; nothing runs
        if config.attention_backend not in (None, "torch"):
            raise ConfigurationError(
                f"attention_backend={config.attention_backend!r} needs a GPU: on a CPU leave it "
                "out."
            )
        sizes = config.block_size_tokens, max_blocks, device.torch_device, first_key
        if not compiles() or model.params_dtype != torch.float32 or config.has_fp8_cache:
            return TorchPagedAttention(*sizes, window, softcap)
        # Layers are compiled where their weights have 8 bits or less.
        takes_chunks = config.quantization is not None
        return HostPagedAttention(*sizes, takes_chunks, window, softcap)
    choose_triton_folder()
    dim = model.kv_channels
    if not HEAD_TILE <= dim <= MAX_DIM or dim % 2:
        raise ConfigurationError(
            f"attention heads of dimension {dim} are not served on a GPU: the kernels take even "
            f"ones from {HEAD_TILE} to {MAX_DIM}. Use device='cpu'."
        )
    if config.has_fp8_cache:
        check_narrow_cache(device.torch_device)
    heads, kv_heads = local_heads(model)
    shape = AttentionShape(
        heads,
        kv_heads,
        dim,
        config.block_size_tokens,
        max_blocks,
        model.params_dtype,
        device.torch_device,
        INVARIANT_PART if config.batch_invariant_mode else 0,
        config.has_fp8_cache,
        window=window,
        softcap=softcap,
        has_sinks=getattr(model, "softmax_type", "vanilla") != "vanilla",
    )
    if first_key:
        # The other backends have no such mask.
        prefill = PrefillChoice.of_one(TritonPrefill(shape, first_key))
    else:
        prefill = choose_prefill(config.attention_backend, shape, device, choices)
    rows = config.max_rows if first_key else config.max_requests
    return GpuPagedAttention(shape, rows, prefill, config.decode_width, first_key)


MOST_INTERVAL = 8192
"""Most tokens between snapshots of a prompt; a model without keys and values has no other
measure."""


def share_states(model: Any, config: InferenceConfig, device: Device) -> StateSharing | None:
    """How an engine shares recurrent states; None if it does not share them.

    Args:
        model: Megatron's `TransformerConfig`; a `HybridModel`'s carries `hybrid_layer_pattern`.
        config: settings of the engine.
        device: of the engine.

    Raises:
        ConfigurationError: `prefix_caching_mamba_gb` has no room for a single snapshot.
    """
    if not config.enable_prefix_caching or not is_recurrent(model):
        return None
    snapshots, interval = config.num_state_snapshots, config.prefix_caching_mamba_interval
    budget = config.prefix_caching_mamba_gb
    if snapshots is None and budget is not None and budget <= 0:
        snapshots = 0
    # A stage without recurrent layers has room for any number.
    most, spacing = 2**31 - 1, MOST_INTERVAL
    if layers := recurrent_layers(model):
        sizes, nowhere = recurrent_sizes(model, layers), torch.device("meta")
        each = make_recurrent_state(sizes, config, model.params_dtype, nowhere).bytes_per_slot
        most = int((budget or 0) * GIB) // each
        if block := block_shape(model, config).num_bytes:
            spacing = min(spacing, -(-each * config.block_size_tokens // block))
    most, spacing = agree_on_least(most), agree_on_least(spacing)
    interval = spacing if interval is None else interval
    if snapshots is None and budget is None:
        # They live in rows that no request needs.
        return StateSharing(0, config.max_requests, interval)
    if snapshots is None and most == 0:
        raise ConfigurationError(
            f"prefix_caching_mamba_gb={budget} has no room for a snapshot of one request's states, "
            "so nothing would be found: give more (`megatron-async info` tells the size), or leave "
            "it out."
        )
    snapshots = most if snapshots is None else snapshots
    return StateSharing(snapshots, snapshots, interval)
