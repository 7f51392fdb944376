#!/usr/bin/env python
"""Ray Serve in front of small CPU replicas: a replica killed among 100 streams, scaling, cost.

    python scripts/check_ray.py --out record.json            # all three; 10 minutes on 2 cores
    python scripts/check_ray.py kill scale                   # some of them

`kill`: the same 100 greedy streams twice, and SIGKILL to one of two replicas in the middle of the
second run: every stream must end with the tokens of the first run. `scale`: from 1 replica to 2 and
back, by the queue's length. `cost`: time to the first token and tokens a second of two replicas,
behind Ray and behind our own coordinator (`megatron-async serve`), in turn.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import ray
from ray import serve

from megatron_async.ray.app import FleetSettings, build
from megatron_async.ray.fleet_settings import set_for_cluster

MODEL = "smollm2"
ENGINE = {"device": "cpu", "dtype": "float32", "max_sequence_length": 256, "max_requests": 50}
RAY_PORT, OWN_PORT, INGRESS_PORT = 18321, 18322, 18323
STREAMS, TOKENS = 100, 24
PAIRS, LOADS = 120, 9
"""Of `cost`: single requests, and runs of `STREAMS` streams, of each fleet."""
CPUS = os.cpu_count() or 1
"""Of a replica: Ray gives its process as many OpenMP threads, and `serve` gives all there are."""
NAME = f"check-ray-{os.getpid()}"


@contextlib.contextmanager
def ray_fleet(lowest: int, highest: int) -> Iterator[str]:
    """A fleet behind Ray; its URL."""
    settings = FleetSettings(
        model=MODEL, engine=ENGINE, name=NAME, min_replicas=lowest, max_replicas=highest,
        target_ongoing_requests=8, upscale_delay_s=2.0, downscale_delay_s=5.0, cpus=CPUS,
        port=INGRESS_PORT,
    )  # fmt: skip
    set_for_cluster()
    ray.init(
        num_cpus=4 * CPUS, include_dashboard=False,
        object_store_memory=200 << 20, log_to_driver=False,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": RAY_PORT})
    try:
        serve.run(build(settings), name=NAME)
        yield f"http://127.0.0.1:{INGRESS_PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextlib.contextmanager
def own_fleet() -> Iterator[str]:
    """Two replicas behind our coordinator; the URL."""
    options = [
        f"--{key.replace('_', '-')}={value}" for key, value in ENGINE.items() if key != "dtype"
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_async", "serve", MODEL, "--replicas", "2",
         "--port", str(OWN_PORT), "--no-progress", *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{OWN_PORT}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def wait_ready(url: str, replicas: int) -> None:
    """Until so many replicas serve."""
    deadline = time.monotonic() + 180
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url + "/ready") as answer:
                    if answer.status == 200 and (await answer.json())["replicas"] >= replicas:
                        return
            await asyncio.sleep(0.3)
    raise TimeoutError(f"{url} has no {replicas} replicas after 180 s.")


async def stream(
    session: aiohttp.ClientSession, url: str, number: int, tokens: list[int], most: int
) -> dict[str, Any]:
    """One greedy stream of `most` tokens: its tokens, put into `tokens` as they come, how it ended,
    and the seconds to its first token."""
    body = {
        "model": MODEL, "prompt": f"Story {number}. Once upon a time", "max_tokens": most,
        "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    start, first, end = time.monotonic(), None, ""
    async with session.post(url + "/v1/completions", json=body) as answer:
        if answer.status != 200:
            return {"tokens": [], "end": (await answer.text())[:200], "ttft": 0.0}
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return {"tokens": tokens, "end": str(event["error"])[:200], "ttft": 0.0}
            first = first or time.monotonic() - start
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
                end = choice.get("finish_reason") or end
    return {"tokens": tokens, "end": end, "ttft": first or 0.0}


async def streams(
    url: str, count: int, kill_after_s: float | None = None, most: int = TOKENS
) -> dict[str, Any]:
    """Many streams at once; SIGKILL to a replica behind Ray after so many seconds."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as s:
        start = time.monotonic()
        tokens: list[list[int]] = [[] for _ in range(count)]
        tasks = [asyncio.create_task(stream(s, url, n, tokens[n], most)) for n in range(count)]
        killed = None
        if kill_after_s is not None:
            await asyncio.sleep(kill_after_s)
            unended = sum(not task.done() for task in tasks)
            victim = replicas_of_ray()[0]
            victim.send_signal(signal.SIGKILL)
            killed = {
                "after_s": round(time.monotonic() - start, 2),
                "unended_streams": unended,
                "streams_with_tokens": sum(map(bool, tokens)),
                "tokens_delivered": sum(map(len, tokens)),
            }
        answers = await asyncio.gather(*tasks)
        return {"answers": answers, "seconds": time.monotonic() - start, "killed": killed}


def replicas_of_ray() -> list[psutil.Process]:
    """The processes of our own fleet's replicas."""
    wanted = f"ray::ServeReplica:{NAME}:engine"
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(wanted):
                found.append(process)
    return found


async def check_kill() -> dict[str, Any]:
    """100 streams, undisturbed and with a kill."""
    with ray_fleet(2, 2) as url:
        await wait_ready(url, 2)
        await streams(url, 4)
        calm = await streams(url, STREAMS)
        rough = await streams(url, STREAMS, calm["seconds"] / 2)
        async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
            text = await answer.text()
    lines = [line for line in text.splitlines() if "service_requests_total{" in line]
    same = [a["tokens"] == b["tokens"] for a, b in zip(calm["answers"], rough["answers"])]
    ends = [answer["end"] for answer in rough["answers"]]
    return {
        "streams": STREAMS,
        "calm_s": round(calm["seconds"], 2),
        "killed_s": round(rough["seconds"], 2),
        "killed": rough["killed"],
        "ends": {end: ends.count(end) for end in set(ends)},
        "equal_streams": sum(same),
        "tokens_each": sorted({len(answer["tokens"]) for answer in rough["answers"]}),
        "counters": lines,
    }


async def check_scale() -> dict[str, Any]:
    """From 1 replica to 2 and back."""
    seen: list[tuple[float, int]] = []
    with ray_fleet(1, 2) as url:
        await wait_ready(url, 1)
        start = time.monotonic()

        async def watch() -> None:
            while True:
                now = len(replicas_of_ray())
                if not seen or seen[-1][1] != now:
                    seen.append((round(time.monotonic() - start, 1), now))
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        ends = []
        for _ in range(3):
            ends += [a["end"] for a in (await streams(url, 60))["answers"]]
        busy_s = time.monotonic() - start
        while seen[-1][1] != 1 and time.monotonic() - start < busy_s + 60:
            await asyncio.sleep(0.5)
        watching.cancel()
    return {
        "load_s": round(busy_s, 1),
        "replicas_at_s": seen,
        "ends": {end: ends.count(end) for end in set(ends)},
    }


async def check_cost() -> dict[str, Any]:
    """Time to the first token of single requests, and tokens a second of many. Both fleets are
    there at once and are asked in turn, so what else the machine does befalls both."""
    alone: dict[str, list[float]] = {"ray": [], "own": []}
    many: dict[str, list[float]] = {"ray": [], "own": []}
    with ray_fleet(2, 2) as of_ray, own_fleet() as own:
        urls = {"ray": of_ray, "own": own}
        for url in urls.values():
            await wait_ready(url, 2)
            await streams(url, 8)
        for turn in range(PAIRS):
            for name, url in in_turn(urls, turn):
                answers = (await streams(url, 1, most=2))["answers"]
                alone[name].append(1e3 * answers[0]["ttft"])
        for turn in range(LOADS):
            for name, url in in_turn(urls, turn):
                many[name].append(STREAMS * TOKENS / (await streams(url, STREAMS))["seconds"])
    added = [mine - ours for mine, ours in zip(alone["ray"], alone["own"])]
    lost = [100 * (1 - mine / ours) for mine, ours in zip(many["ray"], many["own"])]
    return {
        "load_average": os.getloadavg(),
        "ttft_ms_median": medians(alone),
        "ttft_ms": {name: [round(value, 1) for value in all_] for name, all_ in alone.items()},
        "tokens_per_s": {name: [round(value, 1) for value in all_] for name, all_ in many.items()},
        "ttft_added_ms_median_of_pairs": round(statistics.median(added), 1),
        "tokens_per_s_median": medians(many),
        "throughput_lost_percent_of_pairs": [round(value, 1) for value in lost],
        "throughput_lost_percent_median": round(statistics.median(lost), 1),
    }


def in_turn(urls: dict[str, str], turn: int) -> list[tuple[str, str]]:
    """Both fleets, every second time the other one first: a machine's speed changes."""
    pairs = list(urls.items())
    return pairs[::-1] if turn % 2 else pairs


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """The median of each fleet."""
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


CHECKS = {"kill": check_kill, "scale": check_scale, "cost": check_cost}


def main() -> int:
    """Run the checks that were asked for, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--out", type=Path, help="file for the record (JSON)")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"ray": ray.__version__, "cores": len(os.sched_getaffinity(0))}
    for name in arguments.checks or CHECKS:
        record[name] = asyncio.run(CHECKS[name]())
        print(json.dumps({name: record[name]}, indent=1), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    kill = record.get("kill")
    return 0 if kill is None or kill["equal_streams"] == STREAMS else 1


if __name__ == "__main__":
    sys.exit(main())
