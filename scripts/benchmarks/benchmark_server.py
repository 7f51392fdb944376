"""Time an API process between a coordinator and sockets, without an engine.

A mock replica says a step's message at a given rate; a coordinator passes it on; an API process
(`load`: several, `--api-processes`) makes events of it; a reader process, plain sockets and a
selector, keeps what comes and takes it apart when the clock has stopped.

`load`: CPU time of the API processes a token while many streams run, and of the coordinator, in
cores. One command for the target of 256,000 tokens/s, on a host of 16 cores or more:

    python scripts/benchmarks/benchmark_server.py load --streams 256 --api-processes 1 2 4

It needs a tokenizer, but no GPU and no model (`--tokenizer FOLDER`). Windows alternate with windows
of a bare writer, a process that does nothing but write as many bytes as often to as many sockets:
the ratio of both says what all but the sockets costs, whatever else the machine does.

`stall`: half of the streams are never read. What the others get a second, beside what as many get
alone, and the memory of the API process.

`idle`: one request after the other, alone. How long a request takes from the reader to the replica
(`in`), its first token from the replica to the reader (`first`) and the others (`other`), and
whether each token is an event of its own. Both ways lead through the coordinator.
"""

import argparse
import socket
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
from child_processes import Pipe, coordinate, cpu_s, spawn
from server_peers import (
    EVENT,
    FEW,
    GAP_S,
    Served,
    answer_each,
    connected,
    read_all,
    read_half,
    request_bytes,
    serve,
    served_model,
    stream_steps,
    write_bare,
)

from megatron_async.errors import ConfigurationError
from megatron_async.lab.benchmark_record import write_record
from megatron_async.server.answer_stream import EVERY_S

SETTLE_S = 0.3
"""What is under way when a window begins or ends is waited for so long."""


def time_stall(args: argparse.Namespace, served: Served) -> dict[str, float]:
    """Figures of `stall`."""
    half = args.streams // 2
    figures: dict[str, float] = {"streams": args.streams, "rate": args.rate}
    for name, stalled in (("alone", 0), ("beside", half)):
        coordinator, told = spawn(coordinate)
        address = told.recv()[0]
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        replica, steps = spawn(stream_steps, address, half + stalled, args.rate, served)
        steps.recv()
        api, api_pipe = spawn(serve, address, listener, args.one_event_a_token)
        process = psutil.Process(api_pipe.recv())
        readers, read = spawn(read_half, listener.getsockname()[1], half, stalled)
        steps.recv()  # all requests have come
        before, rates = process.memory_info().rss, []
        steps.send("go")
        for _ in range(args.pairs):
            read.send("clear")
            read.recv()
            start = time.perf_counter()
            time.sleep(args.seconds)
            read.send("tell")
            rates.append(read.recv() / (time.perf_counter() - start))
        steps.send("stop")
        figures[f"tokens_a_second_{name}"] = statistics.median(rates)
        figures[f"grown_mib_{name}"] = (process.memory_info().rss - before) / 2**20
        for gone in (readers, replica, api, coordinator):
            gone.kill()
            gone.join()
    figures["ratio"] = figures["tokens_a_second_beside"] / figures["tokens_a_second_alone"]
    return figures


def time_load(args: argparse.Namespace, served: Served, processes: int) -> dict[str, float]:
    """Figures of `load` with so many API processes; their CPU time counts together."""
    streams, rate = args.streams, args.rate
    coordinator, told = spawn(coordinate)
    address, coordinator_pid = told.recv()
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=2048) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    replica, steps = spawn(stream_steps, address, streams, rate, served)
    steps.recv()
    apis = [spawn(serve, address, listeners[0], args.one_event_a_token) for _ in range(processes)]
    every_s = max(EVERY_S, 1 / rate)
    bare, bare_pipe = spawn(write_bare, listeners[1], every_s)
    api_pids, bare_pid = [pipe.recv() for _, pipe in apis], bare_pipe.recv()
    # A reader for each API process: one alone would be what is measured.
    shares = [streams * (n + 1) // processes - streams * n // processes for n in range(processes)]
    readers = [spawn(read_all, *ports, share) for share in shares]
    steps.recv()  # all requests have come
    rows: list[dict[str, float]] = []

    def told_by_readers(order: str) -> list[Any]:
        for _, pipe in readers:
            pipe.send(order)
        return np.sum([pipe.recv() for _, pipe in readers], axis=0).tolist()

    def window(pids: list[int], start: Any, pipe: Pipe) -> tuple[list[float], float, Any, Any]:
        told_by_readers("clear")
        before, begun = [cpu_s(pid) for pid in pids], time.perf_counter()
        pipe.send(start)
        time.sleep(args.seconds)
        pipe.send("stop")
        done, wall = pipe.recv(), time.perf_counter() - begun
        time.sleep(SETTLE_S)
        used = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
        return used, wall, done, told_by_readers("tell")

    for pair in range(args.pairs + 1):
        pids = [*api_pids, coordinator_pid]
        (*each_used, passed), wall, sent, told_all = window(pids, "go", steps)
        reads, size, events, tokens = told_all
        used = sum(each_used)
        bytes_a_write = round(size / max(reads, 1))
        (bare_used,), bare_wall, writes, _ = window([bare_pid], bytes_a_write, bare_pipe)
        if not pair:
            continue  # the first one has what happens once
        bare_us = 1e6 * bare_used / max(writes, 1)
        rows.append(
            {
                "tokens_a_second": tokens / wall,
                "delivered": tokens / max(sent * streams, 1),
                "cores": used / wall,
                "busiest_process": max(each_used) / wall,
                "coordinator": passed / wall,
                "us_a_token": 1e6 * used / max(tokens, 1),
                "tokens_an_event": tokens / max(events, 1),
                "tokens_a_read": tokens / max(reads, 1),
                "bytes_a_token": size / max(tokens, 1),
                "us_a_read": 1e6 * used / max(reads, 1),
                "bare_us_a_write": bare_us,
                "bare_share_of_a_core": bare_used / bare_wall,
                "to_bare": (used / max(reads, 1)) / (bare_us / 1e6) if bare_us else 0.0,
            }
        )
    for pipe in (steps, *(pipe for _, pipe in readers)):
        pipe.send("end")
    bare_pipe.send(0)
    for process in (*(p for p, _ in readers), replica, *(p for p, _ in apis), bare, coordinator):
        process.join(1)
        process.kill()
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    cores_at = {
        f"cores_at_{rate}": medians["us_a_token"] * rate / 1e6 for rate in (64_000, 256_000)
    }
    begin = {"streams": streams, "rate": rate, "api_processes": processes}
    return {**begin, **medians, **cores_at}


def time_idle(args: argparse.Namespace, served: Served) -> dict[str, float]:
    """Figures of `idle`."""
    requests = args.requests + 5  # the first ones have what happens once
    coordinator, told = spawn(coordinate)
    address = told.recv()[0]
    listener = socket.create_server(("127.0.0.1", 0))
    replica, pipe = spawn(answer_each, address, requests, served)
    pipe.recv()
    api, api_pipe = spawn(serve, address, listener, False)
    api_pipe.recv()
    connection = connected(listener.getsockname()[1])
    asked, arrived = [], []
    for _ in range(requests):
        time.sleep(GAP_S)
        asked.append(time.monotonic())
        connection.sendall(request_bytes(FEW))
        arrived.append(list(_events_of_one(connection)))
    heard, spoken = pipe.recv()
    pipe.send("end")
    for process in (replica, api, coordinator):
        process.join(1)
        process.kill()
    ways_in = [1e3 * (at - begun) for begun, at in zip(asked, heard, strict=True)][5:]
    # The last event of an answer has its end; those before it are the tokens'.
    ways_out = [
        [1e3 * (at - said) for said, at in zip(times, events, strict=False)]
        for times, events in zip(spoken, arrived, strict=True)
    ][5:]
    first, other = [ways[0] for ways in ways_out], [w for ways in ways_out for w in ways[1:]]
    p99 = partial(np.percentile, q=99)
    return {
        "requests": args.requests,
        "events_a_token": statistics.mean(len(events) - 1 for events in arrived) / FEW,
        "in_ms": statistics.median(ways_in),
        "first_ms": statistics.median(first),
        "first_ms_p99": float(p99(first)),
        "other_ms": statistics.median(other),
        "other_ms_p99": float(p99(other)),
    }


def _events_of_one(connection: socket.socket) -> Sequence[float]:
    """When the events of one answer came, to its end."""
    times: list[float] = []
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        new = connection.recv(1 << 16)
        if not new:
            raise ConnectionError(f"the server ended the connection after {data[-300:]!r}")
        data += new
        times += [time.monotonic()] * (data.count(EVENT) - len(times))
    if b"200 OK" not in data[:20]:
        raise ConnectionError(f"the server answered {data[:300]!r}")
    return times


WHAT = ("load", "stall", "idle")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures and, with --json, write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=WHAT)
    parser.add_argument("--tokenizer", metavar="FOLDER",
        help="with a tokenizer.json (default: the demo model's, whose package must be "
        "installed)")  # fmt: skip
    parser.add_argument("--api-processes", type=int, nargs="+", default=[1], metavar="N",
        help="of `load`, a measurement each (default 1)")  # fmt: skip
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="steps/s (default 1000)")
    parser.add_argument("--one-event-a-token", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window (default 3)")
    parser.add_argument("--pairs", type=int, default=5, help="of windows (default 5)")
    parser.add_argument("--requests", type=int, default=100, help="of `idle` (default 100)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    served = served_model(args.tokenizer)  # before anything is started
    figures: list[dict[str, Any]] = []

    def tell(what: str, found: dict[str, float]) -> None:
        figures.append({"what": what, **found})
        print(what, " ".join(f"{key}={value:.4g}" for key, value in found.items()), flush=True)

    for what in args.what:
        if what == "load":
            for processes in args.api_processes:
                tell(what, time_load(args, served, processes))
        else:
            tell(what, (time_stall if what == "stall" else time_idle)(args, served))
    if args.json:
        write_record(args.json, "server", vars(args) | {"device": "cpu"}, figures)


if __name__ == "__main__":
    try:
        main()
    except ConfigurationError as error:
        raise SystemExit(str(error)) from error
