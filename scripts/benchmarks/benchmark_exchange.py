"""Time the two exchanges of a layer whose experts are spread over ranks: start it by

    torchrun --nproc-per-node=4 scripts/benchmarks/benchmark_exchange.py

Tokens with their routing go to all ranks, sums come back, residual add and norm follow. Each is
captured in a CUDA graph, many in a row, and replayed on all ranks at once. Columns are microseconds
of both exchanges, the slowest rank's. `EXCHANGE_BYTES` in `ops/experts/symmetric_exchange.py`
should be what a rank reads (`KiB`) where the columns cross.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from replay_time import call_us

from megatron_async.devices import make_device
from megatron_async.models.moe_dispatch import TokenDispatcher
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups, world_size
from megatron_async.ops.experts.expert_gather import packed_row_bytes
from megatron_async.ops.experts.expert_routing import Routing
from megatron_async.ops.experts.symmetric_exchange import LIMIT_VARIABLE, exchange_of
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.profiling.benchmark_record import write_record

CALLS = 48
"""In a graph; layers of qwen3-30b-a3b."""
EPS = 1e-5
DTYPE = torch.bfloat16
MOST_BYTES = 64 << 20
"""Limit of our kernels here, so that columns may cross; the environment comes before it."""


def both_exchanges(
    dispatcher: TokenDispatcher, tokens: int, hidden: int, topk: int
) -> Callable[[], object]:
    """A call of both, and of the norm, by whatever serves so many tokens."""
    x = torch.randn(tokens, hidden, device="cuda").to(DTYPE)
    experts = torch.zeros(tokens, topk, dtype=torch.int32, device="cuda")
    routing = Routing(experts, torch.ones(tokens, topk, device="cuda"))
    sums = torch.randn(world_size() * tokens, hidden, device="cuda").to(DTYPE)
    weight = torch.ones(hidden, device="cuda", dtype=DTYPE)

    def call() -> object:
        dispatcher.dispatch(x, routing, 0)
        if dispatcher.combines_with_norm(sums):
            return dispatcher.combine_add_rms_norm(sums, x, weight, EPS)
        return add_rms_norm(dispatcher.combine(sums, tokens), x, weight, EPS)

    return call


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table on rank 0 and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 512, 1024]
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    os.environ.setdefault(LIMIT_VARIABLE, str(MOST_BYTES))
    device = make_device("cuda")
    ranks = world_size()
    groups = ensure_process_groups(ParallelSizes(expert_model_parallel=ranks))
    dispatcher, exchange = TokenDispatcher(groups.ep, args.topk), exchange_of(groups.ep)
    calls = {n: both_exchanges(dispatcher, n, args.hidden, args.topk) for n in args.tokens}
    nccl = {tokens: call_us(device, call, CALLS) for tokens, call in calls.items()}
    exchange.prepare(max(args.tokens), args.hidden, args.topk, DTYPE, device.torch_device)
    is_first = dist.get_rank() == 0
    if is_first:
        print(exchange.report)
        print(f"{'tokens':>6}{'KiB':>10}{'ours':>10}{'nccl':>10}")
    figures = []
    for tokens, call in calls.items():
        read = (ranks - 1) * tokens * packed_row_bytes(args.hidden, args.topk, DTYPE)
        row: dict[str, float] = {"tokens": tokens, "read_bytes": read, "nccl_us": nccl[tokens]}
        if exchange.find(tokens, args.hidden, args.topk, DTYPE):
            row["ours_us"] = call_us(device, call, CALLS)
        figures.append(row)
        if is_first:
            ours = row.get("ours_us", float("nan"))
            print(f"{tokens:>6}{read / 1024:>10.0f}{ours:>10.1f}{nccl[tokens]:>10.1f}", flush=True)
    if is_first and args.json:
        write_record(args.json, "exchange", {**vars(args), "ranks": ranks}, figures)


if __name__ == "__main__":
    main()
