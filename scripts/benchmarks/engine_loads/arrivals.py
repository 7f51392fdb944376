"""Serve requests that arrive at replicas, as a server does. Start several with torchrun:

    torchrun --nproc-per-node 2 scripts/benchmarks/benchmark_engine.py arrivals \
        --model dummy:qwen3-30b-a3b:uniform --expert-model-parallel-size 2 --rate 16

Each replica has a trace of its own in each round, `--rate` of its own, and an event loop in which
`run_engine` steps. Times count from a request's arrival by the trace. Traces are served with
launches as soon as possible ("at once") and shortly before the running step ends ("late",
`InferenceConfig.late_launch`), by turns, `--rounds` times, on one engine.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from engine_loads.options import (
    add_trace_options,
    cells,
    heads,
    load_parser,
    make_trace,
    open_model,
)
from megatron_async import LLM
from megatron_async.cli.options import add_parallel, parallel_sizes
from megatron_async.communication.bootstrap import join_job
from megatron_async.engine.late_launch import PromptLaunch
from megatron_async.lab.arrival_trace import TraceRequest
from megatron_async.lab.benchmark_record import distribution, write_record
from megatron_async.lab.workloads import greedy

BLOCK_SIZE = 64
AT_ONCE, LATE = "at once", "late"
SPIN_S = 2e-3
"""An event loop's timers may be so late; what is left is waited for by giving other coroutines
their turn."""
COLUMNS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "steps", "late_launches", "duration_s")


def open_llm(args: argparse.Namespace) -> LLM:
    """This rank's part of the model."""
    longest = args.max_prompt_tokens + args.max_output_tokens
    settings = {"lookahead": 1, "late_launch": True, "progress": not args.no_progress}
    settings |= {"num_kv_blocks": args.max_requests * -(-longest // BLOCK_SIZE)}
    settings |= {"block_size_tokens": BLOCK_SIZE, **parallel_sizes(args)}
    return open_model(args.model, args, args.max_requests, longest, args.max_tokens, **settings)


async def serve(llm: LLM, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """Figures of one trace on this replica; returns when all replicas have served theirs."""
    engine, delays = llm.engine, []
    before = engine.stats()
    loop = asyncio.create_task(engine.run_engine())
    begin, futures = time.perf_counter(), []
    for number, planned in enumerate(trace):
        while (left := begin + planned.arrival_s - time.perf_counter()) > 0:
            await asyncio.sleep(left - SPIN_S if left > SPIN_S else 0)
        delays.append(time.perf_counter() - begin - planned.arrival_s)
        params = greedy(planned.output_tokens)
        futures.append(engine.add_request(number, planned.prompt, params))
    ended = await asyncio.gather(*futures)
    duration_s = time.perf_counter() - begin
    await llm.finish_together()
    loop.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loop
    ttft_ms, tpot_ms = [], []
    for request, delay in zip(ended, delays, strict=True):
        if request.error is not None:
            raise RuntimeError(f"request {request.request_id} failed") from request.error
        assert request.ttft is not None  # it completed
        assert request.latency is not None
        ttft_ms.append(1e3 * (request.ttft + delay))
        later = len(request.generated_tokens) - 1
        if later:
            tpot_ms.append(1e3 * (request.latency - request.ttft) / later)
    after = engine.stats()
    counts = {key: int(after[key] - before[key]) for key in ("steps", "late_launches")}
    first, between = distribution(ttft_ms), distribution(tpot_ms)
    return counts | {
        "ttft_p50": first["p50"], "ttft_p99": first["p99"],
        "tpot_p50": between["p50"], "tpot_p99": between["p99"],
        "duration_s": duration_s,
    }  # fmt: skip


async def serve_all(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of this replica: of each round, rate and way of launching."""
    engine, replica = llm.engine, llm.data_parallel_rank
    late, vocabulary = engine.launching, engine.controller.vocab_size
    # Kernels are compiled and step times are learned before the clock counts.
    seeds = [args.seed + number * llm.data_parallel_size + replica for number in range(args.rounds)]
    other_seed = args.seed + args.rounds * llm.data_parallel_size + replica
    await serve(llm, make_trace(args, vocabulary, math.inf, args.warmup_requests, other_seed))
    found = []
    hidden = True if args.no_progress or replica else None  # None: where nobody looks
    plan = list(itertools.product(range(args.rounds), args.rate, (AT_ONCE, LATE)))
    for round_, rate, way in tqdm(plan, unit="trace", disable=hidden):
        trace = make_trace(args, vocabulary, rate, args.num_requests, seeds[round_])
        engine.launching = late if way == LATE else PromptLaunch()
        key = {"replica": replica, "round": round_, "rate": rate, "launches": way}
        found.append(key | await serve(llm, trace))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table on rank 0 and, with --json, write the figures."""
    parser = load_parser("arrivals", __doc__, model="dummy:tiny")
    add_trace_options(parser)
    parser.add_argument("--rounds", type=int, default=2, help="of all traces (default 2)")
    parser.add_argument("--max-requests", type=int, default=64, help="of a replica (default 64)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a step (default 2048)")
    parser.add_argument("--no-progress", action="store_true", help="no bars")
    add_parallel(parser)
    args = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with open_llm(args) as llm:
        if llm.is_primary_rank:
            found = asyncio.run(serve_all(llm, args))
            llm.engine.group.release()
        else:
            llm.engine.follow()
        everyones = join_job().exchange("figures of arrivals", json.dumps(found))
    if os.environ.get("RANK", "0") != "0":
        return
    figures = [row for _, text in sorted(everyones.items()) for row in json.loads(text)]
    figures.sort(key=lambda row: (row["round"], row["rate"], row["replica"]))
    print(f"{'round':>6}{'rate/s':>8}{'replica':>8}  {'launches':<8}" + heads(COLUMNS, 14))
    for row in figures:
        key = f"{row['round']:>6}{row['rate']:>8g}{row['replica']:>8}  {row['launches']:<8}"
        print(key + cells(row, COLUMNS, 14, ".2f"))
    if args.json:
        settings = vars(args) | {"world_size": join_job().world_size}
        write_record(args.json, "arrivals", settings, figures)
