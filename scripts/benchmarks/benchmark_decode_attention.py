"""Decode attention alone, in a graph over many layers' caches, beside the bytes it must read.

With --long-row one row of each batch has that length: a long request among short ones.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch

from megatron_async.ops.attention import decode_attention as ops
from megatron_async.profiling.benchmark_record import write_record

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}
"""(query heads, KV heads, head dimension)."""
BANDWIDTH = 4.3e12
"""Bytes a second that a large copy moves on an H200, reads and writes together."""
MEMORY = 4e9
"""Bytes of KV cache that the layers of a case may take; there are 2 to 30 of them."""


def kv_lengths(rows: int, length: int, long_row: int | None) -> list[int]:
    """Lengths that vary by 10 % between rows, and one long row in the middle if there is to be
    one."""
    lengths = [int(length * (0.9 + 0.1 * row / max(rows - 1, 1))) for row in range(rows)]
    if long_row is not None:
        lengths[rows // 2] = long_row
    return lengths


def microseconds(shape: str, lengths: list[int], block_size: int) -> float:
    """Median microseconds of one layer; the schedule's once a step is shared by the layers."""
    heads, kv_heads, dim = SHAPES[shape]
    cuda = torch.device("cuda")
    rows, blocks = len(lengths), [-(-length // block_size) for length in lengths]
    token_bytes = kv_heads * dim * 4
    layers = max(2, min(30, int(MEMORY / (sum(blocks) * block_size * token_bytes))))
    cache = torch.randn(
        layers, 2, sum(blocks), block_size, kv_heads, dim, dtype=torch.bfloat16, device=cuda
    )
    tables = torch.zeros(rows, max(blocks), dtype=torch.int32)
    for row, own in enumerate(torch.randperm(sum(blocks)).split(blocks)):
        tables[row, : len(own)] = own
    tables = tables.to(cuda)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=cuda)
    query = torch.randn(rows, heads, dim, dtype=torch.bfloat16, device=cuda)
    out = torch.empty_like(query)
    workspace = ops.DecodeWorkspace(rows, heads, kv_heads, dim, cuda)

    def run() -> None:
        workspace.schedule.update(on_device)
        out.zero_()  # so that the schedule is settled
        for keys, values in cache:
            ops.paged_decode_attention(
                query, keys, values, tables, dim**-0.5, workspace, out, is_settled=True
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
    """Print microseconds a layer, the bytes' floor and their ratio; with --json, write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--long-row", type=int, help="length of one row of each batch")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    figures = []
    print(f"{'shape':<14}{'rows':>6}{'length':>8}{'us':>9}{'floor':>8}{'ratio':>7}")
    for shape, rows, length in itertools.product(args.shapes, args.rows, args.lengths):
        _heads, kv_heads, dim = SHAPES[shape]
        lengths = kv_lengths(rows, length, args.long_row)
        found = microseconds(shape, lengths, args.block_size)
        floor = sum(lengths) * kv_heads * dim * 4 / BANDWIDTH * 1e6
        print(f"{shape:<14}{rows:>6}{length:>8}{found:>9.2f}{floor:>8.2f}{found / floor:>7.1f}")
        figures.append(
            {"shape": shape, "rows": rows, "length": length, "us": found, "floor_us": floor}
        )
    if args.json:
        name = "decode_attention" if args.long_row is None else "decode_attention_ragged"
        write_record(args.json, name, {"device": "cuda", **vars(args)}, figures)


if __name__ == "__main__":
    main()
