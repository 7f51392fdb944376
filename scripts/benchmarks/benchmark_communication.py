"""Measure what it costs the CPUs of ranks to agree, and the leader to tell its followers.

    python scripts/benchmarks/benchmark_communication.py --ranks 4   # starts its own ranks
    torchrun --nproc-per-node 8 scripts/benchmarks/benchmark_communication.py

All-reduce of four integers by ZMQ (AsyncZMQCommunicator), gloo and, where each rank has a GPU of
its own, NCCL with the copies to the GPU and back; each back to back, and with a pause before each
round, as between the steps of an engine, in which who waits falls asleep. Then a StepChannel: what
sending costs the leader, and the time until a follower has the message (on one host, which has one
clock).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megatron_async.communication import host
from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.communication.job import Job
from megatron_async.models.parallel_state import ensure_process_groups
from megatron_async.profiling.benchmark_record import write_record

VALUES = (3, 1, 4, 1)
Round = Callable[[], object]


class Step(msgspec.Struct):
    """Stands for what a leader says of a step: when it was sent, and some request ids."""

    sent_ns: int
    requests: list[int]


def rounds_by_backend(job: Job, names: Sequence[str]) -> Iterator[tuple[str, Round]]:
    """Name and one all-reduce of each backend that this job can run."""
    for name in names:
        if name == "zmq":
            communicator = AsyncZMQCommunicator(job, range(job.world_size))
            yield name, lambda c=communicator: c.sync_all_reduce_max(*VALUES)  # type: ignore[misc]
        elif name == "gloo":
            ensure_process_groups()
            values = torch.tensor(VALUES)

            def by_gloo(values: torch.Tensor = values) -> list[int]:
                dist.all_reduce(values, dist.ReduceOp.MAX)
                return values.tolist()

            yield name, by_gloo
        elif torch.cuda.is_available() and torch.cuda.device_count() > job.local_rank:
            torch.cuda.set_device(job.local_rank)
            ensure_process_groups()

            def by_nccl() -> list[int]:
                values = torch.tensor(VALUES, device="cuda")
                dist.all_reduce(values, dist.ReduceOp.MAX)
                return values.tolist()

            yield name, by_nccl
        elif job.rank == 0:
            print(f"{name}: left out, it needs a GPU for each rank")


def measure_round(round_: Round, rounds: int, pause_us: float) -> dict[str, float]:
    """Median and 99 % of a round on this rank, microseconds."""
    for _ in range(max(rounds // 10, 3)):
        round_()
    times = []
    for _ in range(rounds):
        if pause_us:
            time.sleep(pause_us / 1e6)
        start = time.perf_counter_ns()
        round_()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return {"p50_us": float(np.median(times)), "p99_us": float(np.percentile(times, 99))}


def measure_channel(job: Job, messages: int, pause_us: float) -> dict[str, float]:
    """On the leader: microseconds that `send` takes. On followers: until a message is there."""
    channel = StepChannel[Step, Step](job, range(job.world_size), Step)
    times = []
    for _ in range(messages):
        if channel.is_leader:
            time.sleep(pause_us / 1e6)
            start = time.perf_counter_ns()
            channel.send(Step(time.monotonic_ns(), list(range(16))))
            times.append((time.perf_counter_ns() - start) / 1e3)
        else:
            step = channel.receive(60.0)
            times.append((time.monotonic_ns() - step.sent_ns) / 1e3)
    job.exchange("end of channel", "")
    channel.close()
    return {"p50_us": float(np.median(times)), "p99_us": float(np.percentile(times, 99))}


def run_rank(args: argparse.Namespace) -> None:
    """One rank's part; rank 0 prints, and writes the record."""
    host.ABSTRACT_SOCKETS = host.ABSTRACT_SOCKETS and args.local_transport == "ipc"
    job = join_job()
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []

    def add(what: str, pause_us: float, mine: dict[str, float]) -> None:
        told = job.exchange("figures", msgspec.json.encode(mine).decode())
        ranks = [msgspec.json.decode(value, type=dict[str, float]) for value in told.values()]
        if what == "channel":
            groups = {"channel send": ranks[:1], "channel one way": ranks[1:]}
        else:
            groups = {f"all_reduce_max {what}": ranks}
        for name, found in groups.items():
            figure = {key: max(values[key] for values in found) for key in ("p50_us", "p99_us")}
            figures.append({"what": name, "pause_us": pause_us, **figure})
            if job.rank == 0:
                p50, p99 = figure["p50_us"], figure["p99_us"]
                print(f"{name:>22}{pause_us:>12.0f}{p50:>14.1f}{p99:>12.1f}", flush=True)

    if job.rank == 0:
        print(f"{job.world_size} ranks on {len(set(job.hosts))} host(s); of the slowest rank")
        print(f"{'':>22}{'pause us':>12}{'median us':>14}{'99 % us':>12}")
    for name, round_ in rounds_by_backend(job, args.backends):
        for pause_us in args.pause_us:
            add(name, pause_us, measure_round(round_, args.rounds, pause_us))
    if job.world_size > 1 and len({record.host_identity for record in job.records}) == 1:
        for pause_us in args.pause_us:
            add("channel", pause_us, measure_channel(job, args.rounds, pause_us))
    if args.json and job.rank == 0:
        uses_gpu = any("nccl" in figure["what"] for figure in figures)
        settings = {"device": "cuda" if uses_gpu else "cpu", **vars(args)}
        write_record(args.json, "communication", {**settings, "ranks": job.world_size}, figures)
    job.close()


def start_ranks(ranks: int, arguments: Sequence[str]) -> None:
    """Start this script once for each rank, and wait.

    Raises:
        SystemExit: with the exit code of a rank that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(next(code for code in codes if code))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun (default 4)")
    parser.add_argument("--backends", nargs="+", default=["zmq", "gloo", "nccl"])
    parser.add_argument("--rounds", type=int, default=3000, help="measured rounds (default 3000)")
    parser.add_argument("--pause-us", type=float, nargs="+", default=[0.0, 1000.0])
    parser.add_argument(
        "--local-transport",
        choices=["ipc", "tcp"],
        default="ipc",
        help="of ZMQ within a host (default ipc; tcp to compare)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run_rank(args)
    else:
        start_ranks(args.ranks, arguments)


if __name__ == "__main__":
    main()
