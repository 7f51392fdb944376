"""Prefill attention alone, several layers in a graph, by backend.

The floor is the larger of the causal operations' time and the time to read
keys and values once. "ours" is the triton backend. What a step does once, as making a schedule, is
not counted. With --decode-rows a layer also attends for decode rows, as in a mixed step: some
backends leave room for that beside the prompts.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernel_cases.case import OURS, Case, Chain, Family, Hardware, Need, Work
from megatron_async.devices import make_device
from megatron_async.ops.attention.backends.base import AttentionShape, BackendUnavailable
from megatron_async.ops.attention.backends.selection import (
    BACKENDS,
    CALLS,
    CANDIDATES,
    DECODE_KEYS,
    layers_of_step,
)

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}
"""(query heads, KV heads, head dimension)."""
BLOCK_SIZE = 256
Chunks = list[tuple[int, int]]
CHUNKS: dict[str, Chunks] = {
    "128": [(128, 128)],
    "228 over 228": [(228, 228)],
    "4 x 228": [(228, 228)] * 4,
    "16 x 128": [(128, 128)] * 16,
    "512": [(512, 512)],
    "2k": [(2048, 2048)],
    "8k": [(8192, 8192)],
    "32k": [(32768, 32768)],
    "2k over 32k": [(2048, 32768)],
    "128 over 8k": [(128, 8192)],
    "256 over 16k": [(256, 16384)],
    "16 over 32k": [(16, 32768)],
    # One prompt's tail, a chunk of a long prompt, and short prompts: 2048 tokens.
    "ragged": [(37, 3000), (1024, 5120), (600, 600), (200, 200), (90, 90), (64, 64), (33, 33)],
}
"""(query length, KV length) of each row."""
OUR_BACKEND = CANDIDATES[0]
OTHERS = [name for name in BACKENDS if name != OUR_BACKEND]
FP8 = ["triton fp8", "warpgroup fp8"]
"""Columns of our kernels for keys and values in e4m3."""


def need(shape: AttentionShape, chunks: Chunks) -> Need:
    """What one layer needs, as the module's head says; a decode row is a chunk of one token."""
    # Query i of a chunk sees the keys before the chunk and i + 1 of the chunk's own.
    seen = sum(query * (kv - query) + query * (query + 1) / 2 for query, kv in chunks)
    cell = 2 * shape.kv_heads * shape.dim * shape.dtype.itemsize
    return Need(sum(kv for _, kv in chunks) * cell, 4.0 * shape.heads * shape.dim * seen)


def cases(args: argparse.Namespace, shapes: Sequence[str], hardware: Hardware) -> Iterator[Case]:
    """Each shape with each set of chunks, by each backend."""
    block_size = args.block_size or BLOCK_SIZE

    def prepare(name: str, chunks: Chunks) -> Work:
        device = make_device("cuda")
        lengths = [args.decode_keys] * bool(args.decode_rows) + [kv for _, kv in chunks]
        blocks = -(-max(lengths) // block_size)
        wide = AttentionShape(
            *SHAPES[name], block_size, blocks, torch.bfloat16, device.torch_device
        )
        chains, refused = {}, {}
        for column in (OURS, *args.backends, *FP8):
            shape = replace(wide, is_narrow=column in FP8)
            try:
                backend = BACKENDS[OUR_BACKEND if column == OURS else column.split()[0]](shape)
            except BackendUnavailable as reason:
                refused[column] = str(reason)
                continue
            layers = layers_of_step(backend, shape, chunks, args.decode_rows, args.decode_keys)
            chains[column] = Chain(layers, CALLS, backend.captures)
        least = need(wide, chunks + [(1, args.decode_keys)] * args.decode_rows)
        figures = {"operations": least.operations}
        return Work(chains, hardware.floor_us(least), figures, refused)

    for name in shapes:
        for chunks in args.chunks:
            keys = {"shape": name, "chunks": chunks}
            if args.decode_rows:
                keys |= {"decode_rows": args.decode_rows, "decode_keys": args.decode_keys}
            yield Case(f"{name} {chunks}", keys, partial(prepare, name, CHUNKS[chunks]))


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options of this family."""
    group.add_argument("--chunks", nargs="+", default=list(CHUNKS), choices=CHUNKS)
    group.add_argument("--decode-rows", type=int, default=0, help="beside the chunks (default 0)")
    group.add_argument(
        "--decode-keys", type=int, default=DECODE_KEYS, help=f"of each (default {DECODE_KEYS})"
    )
    group.add_argument(
        "--backends", nargs="*", default=list(CANDIDATES[1:]), choices=OTHERS,
        help=f"beside ours, {OUR_BACKEND} (default {' '.join(CANDIDATES[1:])})",
    )  # fmt: skip


FAMILY = Family(
    name="prefill_attention",
    about="attention of prompt chunks, ours beside the other backends",
    shapes=list(SHAPES),
    default_shapes=list(SHAPES),
    parts=(),
    references=[*OTHERS, *FP8],
    add_options=add_options,
    cases=cases,
)
