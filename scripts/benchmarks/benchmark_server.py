"""Time an API process between a coordinator and sockets, without an engine.

A mock replica says a step's message at a given rate; a coordinator passes it on; one API process
makes events of it; one reader process, plain sockets and a selector, keeps what comes and takes it
apart when the clock has stopped.

`load`: CPU time of the API process a token while many streams run. Windows alternate with windows
of a bare writer, a process that does nothing but write as many bytes as often to as many sockets:
the ratio of both says what all but the sockets costs, whatever else the machine does.

`stall`: half of the streams are never read. What the others get a second, beside what as many get
alone, and the memory of the API process.

`idle`: one request after the other, alone. How long a request takes from the reader to the replica
(`in`), its first token from the replica to the reader (`first`) and the others (`other`), and
whether each token is an event of its own. Both ways lead through the coordinator.
"""

from __future__ import annotations

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
    answer_each,
    connected,
    read_all,
    read_half,
    request_bytes,
    serve,
    stream_steps,
    write_bare,
)

from megatron_async.profiling.benchmark_record import write_record
from megatron_async.server.stream_hub import EVERY_S

SETTLE_S = 0.3
"""What is under way when a window begins or ends is waited for so long."""


def time_stall(args: argparse.Namespace) -> dict[str, float]:
    """Figures of `stall`."""
    half = args.streams // 2
    figures: dict[str, float] = {"streams": args.streams, "rate": args.rate}
    for name, stalled in (("alone", 0), ("beside", half)):
        coordinator, told = spawn(coordinate)
        address = told.recv()[0]
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        replica, steps = spawn(stream_steps, address, half + stalled, args.rate)
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


def time_load(args: argparse.Namespace) -> dict[str, float]:
    """Figures of `load`."""
    streams, rate = args.streams, args.rate
    coordinator, told = spawn(coordinate)
    address = told.recv()[0]
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=2048) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    replica, steps = spawn(stream_steps, address, streams, rate)
    steps.recv()
    api, api_pipe = spawn(serve, address, listeners[0], args.one_event_a_token)
    every_s = max(EVERY_S, 1 / rate)
    bare, bare_pipe = spawn(write_bare, listeners[1], every_s)
    api_pid, bare_pid = api_pipe.recv(), bare_pipe.recv()
    readers, read = spawn(read_all, *ports, streams)
    steps.recv()  # all requests have come
    rows: list[dict[str, float]] = []

    def window(pid: int, start: Any, pipe: Pipe) -> tuple[float, float, Any, Any]:
        read.send("clear")
        read.recv()
        before, begun = cpu_s(pid), time.perf_counter()
        pipe.send(start)
        time.sleep(args.seconds)
        pipe.send("stop")
        done, wall = pipe.recv(), time.perf_counter() - begun
        time.sleep(SETTLE_S)
        used = cpu_s(pid) - before
        read.send("tell")
        return used, wall, done, read.recv()

    for pair in range(args.pairs + 1):
        used, wall, sent, (reads, size, events, tokens) = window(api_pid, "go", steps)
        bytes_a_write = round(size / max(reads, 1))
        bare_used, bare_wall, writes, _ = window(bare_pid, bytes_a_write, bare_pipe)
        if not pair:
            continue  # the first one has what happens once
        bare_us = 1e6 * bare_used / max(writes, 1)
        rows.append(
            {
                "tokens_a_second": tokens / wall,
                "delivered": tokens / max(sent * streams, 1),
                "share_of_a_core": used / wall,
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
    for pipe in (steps, read):
        pipe.send("end")
    bare_pipe.send(0)
    for process in (readers, replica, api, bare, coordinator):
        process.join(1)
        process.kill()
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    at_64k = medians["us_a_token"] * 64_000 / 1e6
    return {"streams": streams, "rate": rate, **medians, "cores_at_64000": at_64k}


def time_idle(args: argparse.Namespace) -> dict[str, float]:
    """Figures of `idle`."""
    requests = args.requests + 5  # the first ones have what happens once
    coordinator, told = spawn(coordinate)
    address = told.recv()[0]
    listener = socket.create_server(("127.0.0.1", 0))
    replica, pipe = spawn(answer_each, address, requests)
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


WHAT = {"load": time_load, "stall": time_stall, "idle": time_idle}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures and, with --json, write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=tuple(WHAT))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="steps/s (default 1000)")
    parser.add_argument("--one-event-a-token", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window (default 3)")
    parser.add_argument("--pairs", type=int, default=5, help="of windows (default 5)")
    parser.add_argument("--requests", type=int, default=100, help="of `idle` (default 100)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    figures: list[dict[str, Any]] = []
    for what in args.what:
        found = WHAT[what](args)
        figures.append({"what": what, **found})
        print(what, " ".join(f"{key}={value:.4g}" for key, value in found.items()), flush=True)
    if args.json:
        write_record(args.json, "server", vars(args) | {"device": "cpu"}, figures)


if __name__ == "__main__":
    main()
