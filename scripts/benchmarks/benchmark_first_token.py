"""Time what HTTP adds to the first token, without a model and without a GPU.

An engine that computes nothing steps at the pace of a GPU. It serves one seeded trace in process
(`step_modern`, tokens read on the host) and by HTTP: behind a real replica, coordinator and API
process, asked by plain sockets. Rounds alternate. Reports the median time from a request's arrival
to its first token both ways, and what HTTP adds: the median difference of a request's two times,
and that of the medians. A request's times differ by up to a step as it meets the steps by chance.
With late launches (the default) also the share of launches that the device had to wait for.

    python scripts/benchmarks/benchmark_first_token.py --step-ms 6.5 --rate 48
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
from collections.abc import Sequence
from typing import Any

from child_processes import Pipe, coordinate, spawn
from paced_engine import PacedEngine
from server_peers import serve

from megatron_async.profiling.arrival_trace import LengthDistribution, TraceRequest, poisson_trace
from megatron_async.profiling.benchmark_record import write_record
from megatron_async.profiling.http_trace import HttpReaders, HttpServer
from megatron_async.profiling.trace_server import serve_trace
from megatron_async.serving.replica import Replica

VOCABULARY = 500
"""Token ids of prompts: those of the tiny model that the engine has the shape of."""
LONGEST = 4096


def replicate(address: str, step_s: float, rows: int, is_late: bool, pipe: Pipe) -> None:
    """A replica's process; ends when told."""

    async def run() -> None:
        engine = PacedEngine(step_s, rows, LONGEST, is_late)
        replica = Replica(engine, address, "none", "a")
        running = asyncio.create_task(replica.run())
        await replica.joined.wait()
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv) == "count":
            pipe.send(_counts(engine))
        replica.leave()
        replica.leave()
        await running

    asyncio.run(run())


def serve_here(
    trace: Sequence[TraceRequest], step_s: float, rows: int, is_late: bool, pipe: Pipe
) -> None:
    """The trace in process; tells times to first tokens, seconds, and `_counts`."""
    engine = PacedEngine(step_s, rows, LONGEST, is_late)
    served = serve_trace(engine, trace)
    pipe.send(([request.ttft_s for request in served.requests], _counts(engine)))


def _counts(engine: PacedEngine) -> tuple[int, int]:
    """Steps, and those for which the device had to wait."""
    return engine.statistics.steps, engine.statistics.late_launches


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures and, with --json, write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--step-ms", type=float, default=6.5, help="of a step (default 6.5)")
    add("--rate", type=float, default=48.0, help="arrivals a second (default 48)")
    add("--requests", type=int, default=192, help="of the trace (default 192)")
    add("--prompt-mean", type=float, default=256.0, help="tokens (default 256)")
    add("--output-mean", type=float, default=128.0, help="tokens (default 128)")
    add("--rows", type=int, default=256, help="of a step (default 256)")
    add("--api-processes", type=int, default=1, metavar="N", help="(default 1)")
    add("--rounds", type=int, default=3, help="of both (default 3)")
    add(
        "--late-launch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="launch shortly before the running step ends",
    )
    add("--new-connections", action="store_true", help="one for each request (default: kept)")
    add("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    step_s = args.step_ms / 1e3
    prompts = LengthDistribution(args.prompt_mean, 4 * args.prompt_mean, 0.6)
    outputs = LengthDistribution(args.output_mean, 4 * args.output_mean, 0.6)

    def trace(count: int, seed: int) -> list[TraceRequest]:
        return poisson_trace(args.rate, count, prompts, outputs, VOCABULARY, seed)

    coordinator, told = spawn(coordinate)
    address = told.recv()[0]
    replica, pipe = spawn(replicate, address, step_s, args.rows, args.late_launch)
    pipe.recv()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    apis = [spawn(serve, address, listener, False) for _ in range(args.api_processes)]
    for _, api_pipe in apis:
        api_pipe.recv()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server = HttpServer(url, "none", "", not args.new_connections)
    rows: list[dict[str, Any]] = []
    with HttpReaders(1) as readers:
        readers.serve(server, trace(32, 0))
        for seed in range(1, args.rounds + 1):
            requests = trace(args.requests, seed)
            process, here_pipe = spawn(serve_here, requests, step_s, args.rows, args.late_launch)
            here, (steps, late) = here_pipe.recv()
            process.join()
            pipe.send("count")
            before = pipe.recv()
            http = [timed.ttft_s for timed in readers.serve(server, requests)[0]]
            pipe.send("count")
            http_steps, http_late = (now - old for now, old in zip(pipe.recv(), before))
            shares = {"late": late / steps, "http_late": http_late / max(http_steps, 1)}
            rows.append(_figures(here, http) | shares)
            print(" ".join(f"{key}={value:.4g}" for key, value in rows[-1].items()), flush=True)
    pipe.send("end")
    for child in (replica, *(api for api, _ in apis), coordinator):
        child.join(1)
        child.kill()
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print("median", " ".join(f"{key}={value:.4g}" for key, value in medians.items()))
    if args.json:
        write_record(args.json, "first token", vars(args) | {"device": "cpu"}, rows)


def _figures(here: Sequence[float], http: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    in_process, by_http = (1e3 * statistics.median(times) for times in (here, http))
    return {
        "in_process_ms": in_process,
        "http_ms": by_http,
        "more_ms": by_http - in_process,
        "more_each_ms": 1e3 * statistics.median(b - a for a, b in zip(here, http, strict=True)),
    }


if __name__ == "__main__":
    main()
