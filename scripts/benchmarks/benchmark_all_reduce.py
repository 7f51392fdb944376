"""Time the sums over tensor-parallel ranks, with the residual add and norm after them: start it by

    torchrun --nproc-per-node=4 scripts/benchmarks/benchmark_all_reduce.py

Each way is captured in a CUDA graph, many calls in a row, and replayed on all ranks at once.
Columns are microseconds a call, the slowest rank's. `nccl` and `two shot` are the sum and then our
norm kernel, `one shot` is one kernel for all; `alone` is the norm without any sum. The limits in
`ops/ranks/symmetric_all_reduce.py` should be where the columns cross.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from replay_time import call_us
from torch import Tensor

from megatron_async.devices import make_device
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups, world_size
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.ranks.tensor_collectives import collectives_of
from megatron_async.profiling.benchmark_record import write_record

CALLS = 64
"""In a graph; a step of an 8B model has 65 sums."""
EPS = 1e-5
WAYS = ("alone", "one shot", "two shot", "nccl")


def ways(
    rows: int, hidden: int, dtype: torch.dtype, splits: int
) -> dict[str, Callable[[], object]]:
    """The calls by name, of those that can be had at this size."""
    groups = ensure_process_groups(ParallelSizes(world_size()))
    collectives = collectives_of(groups.tp)
    device = torch.device("cuda", torch.cuda.current_device())
    collectives.prepare(8192, hidden, dtype, device)
    if splits > 1:
        product = torch.randn(splits, rows, 1, hidden, device=device)
    else:
        product = torch.randn(rows, 1, hidden, device=device).to(dtype)
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    weight = torch.ones(hidden, device=device, dtype=dtype)
    whole = product.to(dtype).contiguous()

    def norm(x: Tensor) -> object:
        return add_rms_norm(x.flatten(-3, -2), residual, weight, EPS)

    def nccl() -> object:
        summand = product.sum(0).to(dtype) if splits > 1 else whole
        dist.all_reduce(summand, group=groups.tp)
        return norm(summand)

    found: dict[str, Callable[[], object]] = {"alone": lambda: norm(product), "nccl": nccl}
    symmetric = collectives.symmetric.get((hidden, dtype))
    if symmetric is None:
        return found
    if symmetric.adds_with_norm(product):
        found["one shot"] = lambda: symmetric.add_rms_norm(product, residual, weight, EPS)
    if symmetric.takes(product):
        found["two shot"] = lambda: norm(symmetric.all_reduce(product))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table on rank 0 and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 2048])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--splits", type=int, default=1, help="partial sums of the product")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    device = make_device("cuda")
    ensure_process_groups(ParallelSizes(world_size()))
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"{'rows':>6}" + "".join(f"{way:>12}" for way in WAYS))
    figures = []
    for rows in args.rows:
        calls = ways(rows, args.hidden, torch.bfloat16, args.splits)
        row: dict[str, float] = {"rows": rows}
        for way in WAYS:
            if way in calls:
                row[way] = call_us(device, calls[way], CALLS)
        figures.append(row)
        if is_first:
            cells = "".join(f"{row.get(way, float('nan')):>12.1f}" for way in WAYS)
            print(f"{rows:>6}{cells}", flush=True)
    if is_first and args.json:
        write_record(args.json, "all_reduce", {**vars(args), "ranks": world_size()}, figures)


if __name__ == "__main__":
    main()
