"""Time decode while everything happens at once: arrivals, aborts, stop words, pauses and evictions.

Requests of random lengths fill the batch; each has a stop word, every tenth step (`--abort-rate`)
one is aborted, and the KV pool holds `--memory` of what they would like. Beside it, on an engine
with enough memory, steady decode of the same batch. Step times are medians over 5 windows of steps;
launched ahead is the share of steps that were launched when the one before ended, by device events
on an engine of its own. With --profile the GPU's idle time between steps is read from the kernel
timeline, after all timings.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from step_times import time_steps

from engine_loads.eventful_churn import EventfulChurn, LetterTokenizer
from engine_loads.options import cells, gaps_of, heads, load_parser
from megatron_async import (
    LLM,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    TextGenerationController,
)
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.step_gaps import step_gaps
from megatron_async.lab.workloads import start_steady_decode, steady_decode_tokens
from megatron_async.observe.timeline import Timeline

WINDOWS = 5
BLOCK_SIZE = 16
MAX_TOKENS = 512
PAUSED_GB = 1e-6
RAMP_UP_STEPS = 300
COUNTED = ("pauses", "evictions", "aborted", "stopped")
COLUMNS = (
    "lookahead", "step_ms", "step_p99_ms", "rows", "overlap_ratio", "cpu_us",
    "pauses", "evictions", "aborted", "stopped", "ahead", "gap_us", "gap_p99_us", "steady_ms",
)  # fmt: skip


def open_engine(
    llm: LLM,
    lookahead: int,
    args: argparse.Namespace,
    memory: float,
    timeline: Timeline | None = None,
) -> DynamicInferenceEngine:
    """An engine around the model of `llm` with this share of the KV blocks that the load wants."""
    longest = args.prompt_tokens * 3 // 2 + args.num_tokens * 3 // 2
    steps = WINDOWS * args.steps
    longest = max(
        longest,
        args.prompt_tokens
        + steady_decode_tokens(args.batch_size, args.prompt_tokens, MAX_TOKENS, steps),
    )
    wanted = args.batch_size * -(-(args.prompt_tokens + args.num_tokens // 2) // BLOCK_SIZE)
    if memory >= 1:
        wanted = args.batch_size * (longest // BLOCK_SIZE + 2)
    config = InferenceConfig(
        device=str(llm.engine.context.device.torch_device),
        lookahead=lookahead,
        max_requests=args.batch_size,
        max_tokens=MAX_TOKENS,
        max_sequence_length=longest,
        num_kv_blocks=int(wanted * memory),
        block_size_tokens=BLOCK_SIZE,
        # Paused requests may hold little, so that evictions come too.
        paused_buffer_size_gb=None if memory >= 1 else PAUSED_GB,
    )
    model = llm.engine.controller.inference_wrapped_model.model
    context = DynamicInferenceContext(
        llm.engine.context.model_config, config, llm.engine.context.device, timeline
    )
    controller = TextGenerationController(GPTInferenceWrapper(model, context), LetterTokenizer())
    return DynamicInferenceEngine(controller, context)


def churn_of(engine: DynamicInferenceEngine, args: argparse.Namespace) -> EventfulChurn:
    """The load, ramped up."""
    churn = EventfulChurn(engine, args.prompt_tokens, args.num_tokens, args.abort_rate)
    for _ in range(RAMP_UP_STEPS):
        churn.before_step()
        churn.after_step(engine.step_modern())
    return churn


def drain(engine: DynamicInferenceEngine, churn: EventfulChurn) -> None:
    """Let all requests run to their ends."""
    while engine.has_unfinished_requests():
        churn.after_step(engine.step_modern())


def measure(llm: LLM, lookahead: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the load and of steady decode, each on an engine of its own."""
    engine = open_engine(llm, lookahead, args, args.memory)
    churn = churn_of(engine, args)
    before = dict(engine.stats()) | {"aborted": churn.aborted, "stopped": churn.stopped}
    times = time_steps(engine, WINDOWS, args.steps, churn.before_step, churn.after_step)
    after = dict(engine.stats()) | {"aborted": churn.aborted, "stopped": churn.stopped}
    drain(engine, churn)
    counts = {key: after[key] - before[key] for key in COUNTED}
    steady = open_engine(llm, lookahead, args, 1.0)
    start_steady_decode(steady, args.batch_size, args.prompt_tokens, WINDOWS * args.steps)
    steady_ms = time_steps(steady, WINDOWS, args.steps).step_ms
    cpu_us = times.prepare_us + times.launch_us + times.resolve_us
    ahead = launched_ahead(llm, lookahead, args)
    return {**asdict(times), "cpu_us": cpu_us, **counts, "steady_ms": steady_ms, "ahead": ahead}


def launched_ahead(llm: LLM, lookahead: int, args: argparse.Namespace) -> float:
    """Share of steps that the device had when it was done with the step before."""
    timeline = Timeline()
    engine = open_engine(llm, lookahead, args, args.memory, timeline)
    churn = churn_of(engine, args)
    start = timeline.now_us()
    for _ in range(WINDOWS * args.steps):
        churn.before_step()
        churn.after_step(engine.step_modern())
    drain(engine, churn)
    return step_gaps(timeline.since(start)).launched_ahead_share


def gaps(llm: LLM, lookahead: int, args: argparse.Namespace) -> dict[str, Any]:
    """The gap report of the load, on an engine of its own."""
    engine = open_engine(llm, lookahead, args, args.memory)
    churn = churn_of(engine, args)

    def step() -> None:
        churn.before_step()
        churn.after_step(engine.step_modern())

    found = asdict(gaps_of(step, args.profile_steps))
    drain(engine, churn)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = load_parser("events", __doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="mean (default 64)")
    parser.add_argument("--num-tokens", type=int, default=256, help="mean (default 256)")
    parser.add_argument("--abort-rate", type=float, default=0.1, help="a step (default 0.1)")
    parser.add_argument("--memory", type=float, default=0.6, help="share (default 0.6)")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="steps in each window (default 40)")
    parser.add_argument("--profile", action="store_true", help="the GPU's idle time, too")
    parser.add_argument("--profile-steps", type=int, default=50)
    args = parser.parse_args(arguments)
    with LLM(
        args.model,
        enable_prefix_caching=False,  # prompts come again, and all of them are to be computed
        device=args.device,
        dtype=args.dtype,
        num_kv_blocks=64,
    ) as llm:
        figures = [
            {"model": args.model, "lookahead": k, **measure(llm, k, args)} for k in args.lookahead
        ]
        if args.profile:  # a process that has profiled once launches more slowly from then on
            for row in figures:
                row |= gaps(llm, row["lookahead"], args)
    print_table(figures)
    if args.json:
        write_record(args.json, "events", vars(args), figures)


def print_table(figures: Sequence[dict[str, Any]]) -> None:
    """One line a lookahead."""
    print(heads(COLUMNS, 14))
    for row in figures:
        print(cells(row, COLUMNS, 14, ".6g"))
