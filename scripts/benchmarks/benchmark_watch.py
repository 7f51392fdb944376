"""What it costs an engine to be watched: its thread's CPU time a step, watched and not, in turns.

One engine decodes the same requests again and again. In some rounds somebody looks at it, by
`StepWatch.look` as the page does, each `--every` seconds; others keep a timeline of all steps, to
show what a look saves. Kinds of rounds take turns, so that whatever else the machine does falls on
all of them alike.

    python scripts/benchmarks/benchmark_watch.py --device cpu
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

from megatron_async import LLM, SamplingParams
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.observe.timeline import Timeline
from megatron_async.profiling.benchmark_record import write_record
from megatron_async.serving.step_watch import StepWatch

KINDS = ("alone", "again", "watched", "timeline")
"""Of rounds; "again" is "alone" once more: how much two equal rounds differ."""


async def one_round(
    engine: DynamicInferenceEngine,
    watch: StepWatch,
    kind: str,
    args: argparse.Namespace,
    looks: list[float],
) -> tuple[float, float]:
    """Microseconds of CPU time of the engine's thread and of wall time, a step; those of each look
    are put into `looks`."""
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=args.tokens, termination_id=-1)
    for number in range(args.rows):
        engine.add_request(number, [1, 2, 3 + number], params)
    engine.tracer.timeline = Timeline() if kind == "timeline" else None
    steps, next_look = engine.statistics.steps, time.perf_counter()
    cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
    while engine.context.has_unfinished_requests() or engine.in_flight:
        if kind == "watched" and time.perf_counter() >= next_look:
            begin = time.thread_time_ns()
            watch.look()
            looks.append((time.thread_time_ns() - begin) / 1e3)
            next_look += args.every
        engine.step_modern()
        await asyncio.sleep(0)  # the window's lease is the loop's
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    engine.tracer.timeline = None
    count = engine.statistics.steps - steps
    return cpu / 1e3 / count, wall / 1e3 / count


async def measure(engine: DynamicInferenceEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Of each kind of round the lower quartile, which other processes disturb least, and the median
    difference from the round "alone" beside it; and what a look takes."""
    watch = StepWatch(engine)
    looks: list[float] = []
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(2):
        await one_round(engine, watch, "alone", args, looks)
    order = random.Random(0)
    for _ in range(args.rounds):
        for kind in order.sample(KINDS, len(KINDS)):  # none always follows the same other
            found[kind].append(await one_round(engine, watch, kind, args, looks))
    figures: dict[str, Any] = {"look_cpu_us": statistics.median(looks)}
    for kind, values in found.items():
        cpu, wall = zip(*values, strict=True)
        figures[f"{kind}_cpu_us"] = statistics.quantiles(cpu)[0]
        figures[f"{kind}_wall_us"] = statistics.quantiles(wall)[0]
        pairs = zip(cpu, found["alone"], strict=True)
        figures[f"{kind}_more_cpu_percent"] = statistics.median(
            100 * (mine / alone - 1) for mine, (alone, _) in pairs
        )
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="dummy:tiny")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100, help="of each request: steps of a round")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=float, default=0.3, help="seconds between two looks")
    parser.add_argument("--json", metavar="FILE", help="write the figures here, too")
    args = parser.parse_args()
    with LLM(args.model, device=args.device, max_requests=args.rows) as llm:
        figures = asyncio.run(measure(llm.engine, args))
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    if args.json:
        write_record(args.json, "watch", vars(args), [figures])


if __name__ == "__main__":
    main()
