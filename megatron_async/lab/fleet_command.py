"""The command `megatron-async simulate-fleet`: memory, routing and replicas for a trace."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_async.cli.fields import flag
from megatron_async.cli.files import check_writable
from megatron_async.cli.options import FIGURES, NO_PROGRESS, Rows, add_rows
from megatron_async.lab.simulate_command import (
    MOST_REQUESTS,
    add_machine,
    check_machine,
    load_machine,
)

TRACE_HELP = """requests, and which prompts begin alike (default: chats):
  chats       made up: users who come back; a few system prompts come first
  agents      made up: programs with tools, on contexts that grow
  PATH.jsonl  a file in the format of Mooncake's public traces"""

TRACE: Rows = (
    ("--trace", str, "TRACE", "chats", TRACE_HELP),
    ("--write-trace", str, "FILE", None, "write the trace, and do no more"),
)
MADE_UP: Rows = (
    ("rate", float, "N", 8.0, "requests a second, in the mean, of a made-up trace"),
    ("num_requests", int, "N", 1000, "requests of a made-up trace"),
    ("seed", int, "N", 0, "of a made-up trace"),
)
FLEET: Rows = (
    ("--replicas", [int], "N", [1], "how many"),
    ("--policy", [str], "NAME", ["prefix"],
     "choice of a replica: prefix (the coordinator's default), least-loaded, round-robin"),
)  # fmt: skip
CACHE: Rows = (
    ("--kv-gb", [float], "GIB", [40.0], "KV pool of a replica, GiB"),
    ("--block-size-tokens", [int], "N", [64], "tokens in a KV block"),
    ("--prefix-caching-mamba-gb", [float], "GIB", [None],
     "snapshots of recurrent states of a replica, GiB; 0: none (default: in rows that no "
     "request needs)"),
    ("--prefix-caching-mamba-interval", [int], "N", [None],
     "tokens between snapshots inside a prompt; 0: none"),
    ("--no-prefix-caching", bool, None, False, "keep no blocks, for comparison"),
)  # fmt: skip
ENGINE_OPTIONS: Rows = (
    ("max_requests", int, "N", None, "requests that a replica serves at once"),
    ("max_tokens", int, "N", 2048, "token budget of one step"),
    ("lookahead", int, "N", 1, "steps in flight"),
)
LAST: Rows = (
    ("--processes", int, "N", 1, "rows at a time"),
    FIGURES,
    NO_PROGRESS,
)
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("GiB", "kv_gb", "{:g}"),
    ("block", "block_size_tokens", "{}"),
    ("states GiB", "state_gb", "{}"),
    ("every", "interval", "{}"),
    ("replicas", "replicas", "{}"),
    ("policy", "policy", "{}"),
    ("hits %", "hit_percent", "{:.1f}"),
    ("TTFT p50", "ttft_p50_ms", "{:.0f}"),
    ("p99 ms", "ttft_p99_ms", "{:.0f}"),
    ("TPOT p50", "tpot_p50_ms", "{:.1f}"),
    ("req/s", "requests_per_second", "{:.1f}"),
    ("in/s", "tokens_in_per_second", "{:.0f}"),
    ("out/s", "tokens_out_per_second", "{:.0f}"),
    ("evicted", "evictions", "{}"),
)
"""The table: title, key of a row, format."""
MOST = {
    "num_requests": MOST_REQUESTS, "replicas": 2**16, "block_size_tokens": 2**20,
    "processes": 256,
}  # fmt: skip
"""Largest values; the smallest is 1."""
OF_STATES = ("state_gb", "interval")
"""Columns that are left out where no row has a value of theirs."""


def add_simulate_fleet(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `simulate-fleet`."""
    fleet = commands.add_parser(
        "simulate-fleet",
        run=run_simulate_fleet,
        parents=[common],
        help="serve a trace with shared prompts by simulated replicas",
        description="Serve a trace by replicas behind the coordinator's own routing, in virtual\n"
        "time: how much KV memory, which policy, how many replicas. Every combination\n"
        "of the options that take several values is a row.",
        epilog="""examples:
  megatron-async simulate-fleet --trace chats --rate 60 --replicas 4 8 --kv-gb 4 16
  megatron-async simulate-fleet --trace toolagent_trace.jsonl --replicas 16 --policy prefix
  megatron-async simulate-fleet --trace agents --write-trace agents.jsonl
  megatron-async simulate-fleet --machine h200:nemotron-3-nano-30b --trace agents
      --prefix-caching-mamba-gb 5 20 --prefix-caching-mamba-interval 0 2048""",
    )
    add_machine(fleet, "h200:llama-3.1-8b")
    trace, group, engine = map(fleet.add_argument_group, ("trace", "fleet", "engine"))
    for place, rows in (
        (trace, TRACE), (group, FLEET), (engine, CACHE), (trace, MADE_UP), (engine, ENGINE_OPTIONS),
        (fleet, LAST),
    ):  # fmt: skip
        add_rows(place, rows)


def run_simulate_fleet(arguments: argparse.Namespace) -> int:
    """Print the table and, with --json, write the figures."""
    check_options(arguments)

    from tqdm import tqdm

    from megatron_async.lab.benchmark_record import write_record
    from megatron_async.lab.fleets.fleet_jobs import TraceSource, run_jobs
    from megatron_async.lab.fleets.trace_files import write_trace
    from megatron_async.lab.fleets.traced_requests import hit_ceiling

    source = TraceSource(arguments.trace, arguments.rate, arguments.num_requests, arguments.seed)
    if arguments.write_trace:
        count = write_trace(arguments.write_trace, source.open())
        print(f"{count} requests in {arguments.write_trace}")
        return 0
    ceilings = {size: hit_ceiling(source.open(), size) for size in arguments.block_size_tokens}
    first = next(iter(ceilings.values()))
    jobs = make_jobs(arguments, source, first.longest)
    bar = tqdm(run_jobs(jobs, arguments.processes), total=len(jobs), unit="row",
               disable=arguments.no_progress or None)  # fmt: skip
    figures = [{**row, "ceiling": ceilings[row["block_size_tokens"]].found_ratio} for row in bar]
    print(
        f"{first.requests} requests, {first.prompt_tokens / max(first.requests, 1):.0f} prompt "
        f"tokens each, {100 * first.shared_ratio:.1f} % of them seen before"
    )
    for size, ceiling in ceilings.items():
        print(f"a cache without limits, blocks of {size}: {100 * ceiling.found_ratio:.1f} % hits")
    print(f"steps take the time of: {jobs[0].machine.source}\n")
    print("\n".join(fleet_lines(figures)))
    if arguments.json:
        settings = {k: v for k, v in vars(arguments).items() if k not in ("run", "command")}
        write_record(arguments.json, "simulate-fleet", {"device": "cpu", **settings}, figures)
    return 0


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse wrong options before a long trace is read.

    Raises:
        ValueError: an option that cannot be honoured.
    """
    from megatron_async.lab.fleets.session_traces import KINDS
    from megatron_async.serving.routing import make_policy

    for name in arguments.policy:
        make_policy(name)
    check_machine(arguments.machine)
    if arguments.trace not in KINDS and not Path(arguments.trace).is_file():
        raise ValueError(
            f"--trace {arguments.trace} is neither a file nor one of {', '.join(KINDS)}: give JSON "
            "lines as Mooncake's traces are, or one of these kinds."
        )
    for option in ("write_trace", "json"):
        if (file := getattr(arguments, option)) is not None:
            check_writable(flag(option), file)
    if not 0 < arguments.rate < math.inf:
        raise ValueError(f"--rate {arguments.rate:g} must be above 0, and finite.")
    for name, most in MOST.items():
        given = getattr(arguments, name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if not 1 <= value <= most:
                raise ValueError(f"{flag(name)} {value} must be from 1 to {most}.")
    if arguments.seed < 0:
        raise ValueError(f"--seed {arguments.seed} must be 0 or more.")


def make_jobs(arguments: argparse.Namespace, source: Any, longest: int) -> list[Any]:
    """A `FleetJob` for every combination."""
    from megatron_async.config import InferenceConfig
    from megatron_async.lab.fleets.fleet_jobs import FleetJob

    shape, machine = load_machine(arguments.machine)
    options = {name: getattr(arguments, name) for name, *_ in ENGINE_OPTIONS}
    grid = itertools.product(
        arguments.kv_gb,
        arguments.block_size_tokens,
        arguments.prefix_caching_mamba_gb,
        arguments.prefix_caching_mamba_interval,
        arguments.replicas,
        arguments.policy,
    )
    return [
        FleetJob(
            source,
            shape,
            machine,
            InferenceConfig(
                buffer_size_gb=kv_gb,
                block_size_tokens=size,
                max_sequence_length=max(longest, 1),
                enable_prefix_caching=not arguments.no_prefix_caching,
                prefix_caching_mamba_gb=state_gb,
                prefix_caching_mamba_interval=interval,
                **options,
            ),
            replicas,
            policy,
        )
        for kv_gb, size, state_gb, interval, replicas, policy in grid
    ]


def fleet_lines(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The table, a line for each row of figures."""
    given = [(row["prefix_caching_mamba_gb"], row["snapshot_interval"]) for row in figures]
    states = any(values != (None, None) for values in given)
    columns = [column for column in COLUMNS if states or column[1] not in OF_STATES]
    rows = [[title for title, *_ in columns]]
    for row in figures:
        states_gb = row["prefix_caching_mamba_gb"]
        shown = {
            **row,
            "hit_percent": 100 * row["hit_ratio"],
            "ttft_p50_ms": row["ttft_ms"]["p50"],
            "ttft_p99_ms": row["ttft_ms"]["p99"],
            "tpot_p50_ms": row["tpot_ms"]["p50"] or float("nan"),
            "state_gb": "-" if states_gb is None else f"{states_gb:g}",
            "interval": "" if row["snapshot_interval"] is None else row["snapshot_interval"],
        }
        rows.append([layout.format(shown[key]) for _, key, layout in columns])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
