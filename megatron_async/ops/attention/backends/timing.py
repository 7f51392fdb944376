"""Device time of a layer's attention with a prefill backend, on random numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from megatron_async.devices import Device
from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    PrefillBackend,
    PrefillRows,
)
from megatron_async.ops.attention.backends.prefill_choice import DECODE_KEYS
from megatron_async.ops.attention.decode_attention import DecodeWorkspace, paged_decode_attention

CALLS = 4
"""Layers in a measured graph."""
REPEATS = 5
MOST_BYTES = 128 << 20
"""Of the caches of a measured graph, if one layer's are not larger."""


@torch.inference_mode()
def time_backend(
    backend: PrefillBackend,
    shape: AttentionShape,
    device: Device,
    chunks: Sequence[tuple[int, int]],
    decode_rows: int = 0,
) -> float:
    """Median device time of a layer, microseconds.

    Args:
        backend: what is timed.
        shape: of the attention.
        device: a GPU; or a CPU, with a backend that is not captured and no decode rows.
        chunks: (query length, KV length) of each row, cut to the longest sequence.
        decode_rows: of `DECODE_KEYS` keys, whose attention is timed with the chunks'.
    """
    layers = layers_of_step(backend, shape, chunks, decode_rows)
    device.fence()
    device.compute.launch(layers)  # kernels are compiled
    replay = device.capture(layers).replay if backend.captures else layers
    device.compute.launch(replay)
    times = []
    for _ in range(REPEATS):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        device.compute.launch(replay)
        device.compute.record(end)
        end.wait()
        times.append(end.us_since(start) / CALLS)
    return statistics.median(times)


def layers_of_step(
    backend: PrefillBackend,
    shape: AttentionShape,
    chunks: Sequence[tuple[int, int]],
    decode_rows: int = 0,
    decode_keys: int = DECODE_KEYS,
) -> Callable[[], None]:
    """A call that enqueues the attention of `CALLS` layers of one step, on random numbers. What a
    step does once is done here.

    Args:
        backend: what attends for the chunks.
        shape: of the attention.
        chunks: (query length, KV length) of each row, cut to the longest sequence.
        decode_rows: rows that decode; they need a GPU.
        decode_keys: KV length of each of these, cut too.
    """
    where, size = shape.device, shape.block_size
    longest = shape.longest_sequence
    cut = [(min(query, kv, longest), min(kv, longest)) for query, kv in chunks]
    lengths = [min(decode_keys, longest)] * decode_rows + [kv for _, kv in cut]
    starts = list(accumulate((query for query, _ in cut), initial=decode_rows))
    blocks = [-(-length // size) for length in lengths]
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, own in enumerate(torch.randperm(sum(blocks)).split(blocks)):
        tables[row, : len(own)] = own
    cells = (sum(blocks), size, shape.kv_heads, shape.dim)
    # A cache for each layer, unless they would be large: layers find nothing in the second cache
    # that decode rows of an earlier one have read.
    cell_bytes = 2 * math.prod(cells) * shape.dtype.itemsize
    count = min(CALLS, max(MOST_BYTES // cell_bytes, 1)) if decode_rows else 1
    caches = torch.randn((count, 2, *cells), dtype=shape.dtype, device=where)
    query = torch.randn(starts[-1], shape.heads, shape.dim, dtype=shape.dtype, device=where)
    block_tables = tables.to(where)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32, device=where)  # sync-ok: at the start
    first_tokens = torch.tensor(starts, dtype=torch.int32, device=where)  # sync-ok: at the start
    queries = [asked for asked, _ in cut]
    backend.begin_step(
        PrefillRows(
            block_tables[decode_rows:],
            kv_lengths[decode_rows:],
            first_tokens,
            sum(queries),
            max(queries),
            max(kv for _, kv in cut),
            tuple(cut),
            decode_rows,
        )
    )
    workspace = None
    if decode_rows:
        workspace = DecodeWorkspace(decode_rows, shape.heads, shape.kv_heads, shape.dim, where)
        workspace.schedule.update(kv_lengths[:decode_rows])

    def layers() -> None:
        for layer in range(CALLS):
            keys, values = caches[layer % count]
            out = torch.empty_like(query)
            backend.attend(query, keys, values, shape.dim**-0.5, out)
            if workspace is not None:
                # As `GpuPagedAttention` does.
                paged_decode_attention(
                    query[:decode_rows],
                    keys,
                    values,
                    block_tables[:decode_rows],
                    shape.dim**-0.5,
                    workspace,
                    out[:decode_rows],
                    is_settled=True,
                    is_beside=backend.lets_others_start,
                )

    return layers
