"""Prefill attention alone, one layer in a graph, by backend, beside the floor that its work sets.

The floor is the larger of the causal FLOPs at --tflops (790: bfloat16 on an H200, dense, as cuBLAS
reaches it) and the bytes of keys and values, read once, at --tbps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from megatron_async.devices import make_device, resolve_device_name
from megatron_async.ops.attention.backends.base import AttentionShape, BackendUnavailable
from megatron_async.ops.attention.backends.selection import BACKENDS, time_backend
from megatron_async.profiling.benchmark_record import write_record

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}
"""(query heads, KV heads, head dimension)."""
Chunks = list[tuple[int, int]]
CASES: dict[str, Chunks] = {
    "128": [(128, 128)],
    "16 x 128": [(128, 128)] * 16,
    "512": [(512, 512)],
    "2k": [(2048, 2048)],
    "8k": [(8192, 8192)],
    "32k": [(32768, 32768)],
    "2k over 32k": [(2048, 32768)],
    "128 over 8k": [(128, 8192)],
    # One prompt's tail, a chunk of a long prompt, and short prompts: 2048 tokens.
    "ragged": [(37, 3000), (1024, 5120), (600, 600), (200, 200), (90, 90), (64, 64), (33, 33)],
}
"""(query length, KV length) of each row."""


def floor_us(shape: AttentionShape, chunks: Chunks, tflops: float, tbps: float) -> float:
    """Microseconds that one layer needs at least; see the module's head."""
    # Query i of a chunk sees the keys before the chunk and i + 1 of the chunk's own.
    seen = sum(query * (kv - query) + query * (query + 1) / 2 for query, kv in chunks)
    flops = 4.0 * shape.heads * shape.dim * seen
    cell = 2 * shape.kv_heads * shape.dim * shape.dtype.itemsize
    return max(flops / tflops, sum(kv for _, kv in chunks) * cell / tbps) / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS)[:3], choices=BACKENDS)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--device", default=None)
    parser.add_argument("--tflops", type=float, default=790.0, help="of the device, for the floor")
    parser.add_argument("--tbps", type=float, default=4.3, help="terabytes a second, likewise")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    device = make_device(resolve_device_name(args.device))
    dtype = torch.float32 if device.torch_device.type == "cpu" else torch.bfloat16
    print(f"{'shape':<14}{'chunks':<13}{'backend':<14}", end="")
    print(f"{'us':>10}{'floor':>10}{'ratio':>9}{'TFLOP/s':>9}")
    figures = []
    for name in args.shapes:
        for case in args.cases:
            chunks = CASES[case]
            blocks = -(-max(kv for _, kv in chunks) // args.block_size)
            shape = AttentionShape(
                *SHAPES[name], args.block_size, blocks, dtype, device.torch_device
            )
            floor = floor_us(shape, chunks, args.tflops, args.tbps)
            # Of the FLOPs alone: the bytes cost nothing here.
            work = floor_us(shape, chunks, 1.0, float("inf"))
            for backend in args.backends:
                try:
                    found = time_backend(BACKENDS[backend](shape), shape, device, chunks)
                except BackendUnavailable as reason:
                    print(f"{name:<14}{case:<13}{backend:<14}{reason}")
                    continue
                figures.append(
                    {
                        "shape": name,
                        "chunks": case,
                        "backend": backend,
                        "us": found,
                        "floor_us": floor,
                        "over_floor": found / floor,
                        "tflops": work / found,
                    }
                )
                print(
                    f"{name:<14}{case:<13}{backend:<14}{found:>10.1f}{floor:>10.2f}"
                    f"{found / floor:>9.1f}{work / found:>9.0f}",
                    flush=True,
                )
    if args.json:
        write_record(args.json, "prefill_attention", vars(args), figures)


if __name__ == "__main__":
    main()
