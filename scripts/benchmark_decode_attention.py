"""Decode attention alone, in a graph over many layers' caches, beside the bytes it must read."""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch

from megatron_async.ops import decode_attention as ops

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}
"""(query heads, KV heads, head dimension)."""
BANDWIDTH = 4.3e12
"""Bytes a second that a large copy moves on an H200, reads and writes together."""


def microseconds(shape: str, rows: int, length: int, longest: int, block_size: int) -> float:
    """Median microseconds of one layer; the KV lengths vary by 10 % between rows."""
    heads, kv_heads, dim = SHAPES[shape]
    cuda = torch.device("cuda")
    blocks = -(-length // block_size)
    layers = max(2, min(30, int(4e9 / (rows * blocks * block_size * kv_heads * dim * 4))))
    cache = torch.randn(
        layers, 2, rows * blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=cuda
    )
    tables = torch.randperm(rows * blocks, device=cuda).int().view(rows, blocks)
    lengths = torch.linspace(0.9 * length, length, rows, device=cuda).int()
    query = torch.randn(rows, heads, dim, dtype=torch.bfloat16, device=cuda)
    out = torch.empty_like(query)
    workspace = ops.DecodeWorkspace(rows, heads, dim, cuda)
    parts = ops.number_of_parts(rows, kv_heads, longest, workspace.processors)

    def run() -> None:
        for layer in cache:
            ops.paged_decode_attention(
                query, layer[0], layer[1], tables, lengths, dim**-0.5, parts, workspace, out
            )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 5 / layers)
    return statistics.median(times)


def main() -> None:
    """Print microseconds a layer, the bytes' floor and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--longest", type=int, default=2560, help="longest KV length to plan for")
    parser.add_argument("--block-size", type=int, default=64)
    args = parser.parse_args()
    print(f"{'shape':<14}{'rows':>6}{'length':>8}{'us':>9}{'floor':>8}{'ratio':>7}")
    for shape, rows, length in itertools.product(args.shapes, args.rows, args.lengths):
        _heads, kv_heads, dim = SHAPES[shape]
        longest = max(args.longest, length)
        found = microseconds(shape, rows, length, longest, args.block_size)
        floor = rows * 0.95 * length * kv_heads * dim * 4 / BANDWIDTH * 1e6
        print(f"{shape:<14}{rows:>6}{length:>8}{found:>9.2f}{floor:>8.2f}{found / floor:>7.1f}")


if __name__ == "__main__":
    main()
