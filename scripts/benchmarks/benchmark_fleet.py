"""How much memory, which policy, how many replicas: simulated fleets that serve a trace in time.

For each KV pool, block size and policy the fleets are simulated from the smallest to the largest
(`megatron_async/lab/fleets/`), and the table says of each the hit ratio and the time to the
first token, and which is the smallest that keeps `--ttft-ms` for 99 % of the requests. No GPU is
needed. An aim that no fleet keeps, for want of speed and not of memory, is a "-".
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from megatron_async.config import InferenceConfig
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.fleets.fleet_jobs import FleetJob, TraceSource, run_jobs
from megatron_async.lab.fleets.traced_requests import hit_ceiling
from megatron_async.lab.simulate_command import load_machine
from megatron_async.serving.routing import POLICIES


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="chats", help="a file, or chats or agents")
    parser.add_argument("--rate", type=float, default=32.0, help="requests/s of made-up traces")
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default="h200:llama-3.1-8b")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=[*POLICIES])
    parser.add_argument("--kv-gb", type=float, nargs="+", default=[8.0, 32.0])
    parser.add_argument("--block-size-tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--ttft-ms", type=float, default=250.0, help="aim for 99 %% of requests")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    source = TraceSource(args.trace, args.rate, args.num_requests, args.seed)
    ceilings = {size: hit_ceiling(source.open(), size) for size in args.block_size_tokens}
    jobs = make_jobs(args, source, max(ceiling.longest for ceiling in ceilings.values()))
    figures = list(
        tqdm(run_jobs(jobs, args.processes), total=len(jobs), unit="fleet", disable=None)
    )
    for row in figures:
        row["ceiling"] = ceilings[row["block_size_tokens"]].found_ratio
    print("\n".join(table(figures, args.ttft_ms)))
    if args.json:
        write_record(args.json, "benchmark_fleet", {"device": "cpu", **vars(args)}, figures)


def make_jobs(args: argparse.Namespace, source: TraceSource, longest: int) -> list[FleetJob]:
    """A fleet for every combination; sequences have at most `longest` tokens."""
    shape, machine = load_machine(args.machine)
    grid = itertools.product(args.kv_gb, args.block_size_tokens, args.policy, sorted(args.replicas))
    return [
        FleetJob(
            source, shape, machine,
            InferenceConfig(
                buffer_size_gb=kv_gb, block_size_tokens=size, max_sequence_length=longest,
                enable_prefix_caching=True,
            ),
            replicas, policy,
        )
        for kv_gb, size, policy, replicas in grid
    ]  # fmt: skip


def table(figures: Sequence[dict[str, Any]], ttft_ms: float) -> list[str]:
    """Markdown: a row for each pool, block size and policy; in a cell for each number of replicas,
    hits in per cent of prompt tokens and the 99 % of TTFT, milliseconds."""
    sizes = sorted({row["replicas"] for row in figures})
    heads = [f"{size} replicas" for size in sizes]
    lines = [
        f"| KV GiB | block | policy | {' | '.join(heads)} | enough for {ttft_ms:g} ms |",
        "| --- " * (4 + len(sizes)) + "|",
    ]
    groups = itertools.groupby(
        figures, key=lambda row: (row["kv_gb"], row["block_size_tokens"], row["policy"])
    )
    for (kv_gb, size, policy), group in groups:
        rows = {row["replicas"]: row for row in group}
        cells = [
            f"{100 * rows[n]['hit_ratio']:.1f} %, {rows[n]['ttft_ms']['p99']:.0f}" for n in sizes
        ]
        enough = next((n for n in sizes if rows[n]["ttft_ms"]["p99"] <= ttft_ms), "-")
        lines.append(f"| {kv_gb:g} | {size} | {policy} | {' | '.join(cells)} | {enough} |")
    by_size = {row["block_size_tokens"]: row["ceiling"] for row in figures}
    lines += [f"\nceiling, blocks of {size}: {100 * each:.1f} %" for size, each in by_size.items()]
    return lines


if __name__ == "__main__":
    main()
