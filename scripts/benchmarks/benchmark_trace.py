"""Serve equal requests that arrive by the step: chunked prefill of all, then decode of all.

--requests prompts of --prompt-tokens tokens arrive at once, or one every --arrive-every steps, and
generate --output-tokens each. Prefill lasts from the first arrival until all have their first
token; its steps are those launched until the last prompt token is launched, decode rows among them.
Decode is the steps after it that have a row of every request. (There are none where the first
requests end before the last are prefilled: allow more output tokens, or a larger --max-tokens.)
Each load is served once, after a short warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch
from equal_trace import EqualTrace
from model_options import add_model_options, routed
from step_times import captured_by_nsys, counted

from megatron_async import LLM, DynamicInferenceEngine
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.profiling.benchmark_record import distribution, write_record
from megatron_async.profiling.gap_report import GapReport, gap_report
from megatron_async.profiling.gpu_profile import FIRST_KERNEL, device_activities, profile_device
from megatron_async.profiling.workloads import FIRST_DECODE_STEPS

BLOCK_SIZE = 64
WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 8


def open_engine(model: str, lookahead: int, args: argparse.Namespace) -> LLM:
    """A model with room for all requests at once."""
    longest = args.prompt_tokens + max(args.output_tokens, WARM_UP_TOKENS)
    return LLM(
        model,
        enable_prefix_caching=False,  # prompts come again, and all of them are to be computed
        device=args.device,
        dtype=args.dtype,
        mamba_ssm_states_dtype=args.mamba_ssm_states_dtype,
        lookahead=lookahead,
        max_requests=args.requests,
        max_tokens=max(args.max_tokens, args.requests),
        max_sequence_length=longest,
        num_kv_blocks=args.requests * -(-longest // BLOCK_SIZE),
        block_size_tokens=BLOCK_SIZE,
    )


def start(engine: DynamicInferenceEngine, args: argparse.Namespace) -> EqualTrace:
    """The trace of the command line, after a warm-up."""
    few = min(WARM_UP_REQUESTS, args.requests)
    EqualTrace(engine, few, args.prompt_tokens, WARM_UP_TOKENS, 1, seed=1).finish()
    while engine.has_unfinished_requests():
        engine.step_modern()
    sizes = args.requests, args.prompt_tokens, args.output_tokens
    return EqualTrace(engine, *sizes, args.arrive_every)


def measure(model: str, lookahead: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the trace on one engine, whose memory is free again afterwards."""
    with open_engine(model, lookahead, args) as llm:
        trace, counters = start(llm.engine, args), llm.engine.statistics
        with captured_by_nsys():
            snapshots, begin = [deepcopy(counters)], time.perf_counter()
            while trace.is_prefilling:
                trace.step()
            snapshots.append(deepcopy(counters))
            for _ in range(FIRST_DECODE_STEPS):  # the last prefill steps are resolved in these
                trace.step()
            ends, snapshot = [time.perf_counter()], deepcopy(counters)
            snapshots += [snapshot, snapshot]
            while not trace.ended and trace.step() == args.requests:
                ends.append(time.perf_counter())
                snapshots[-1] = deepcopy(counters)
            trace.finish()
            total = time.perf_counter() - begin
    prefill = max(request.arrival_time + (request.ttft or 0.0) for request in trace.ended) - begin
    tokens_in, tokens_out = (
        args.requests * tokens for tokens in (args.prompt_tokens, args.output_tokens)
    )
    return {
        "total_s": total,
        "tokens_per_second": tokens_out / total,
        "ttft_ms": distribution(1e3 * (request.ttft or 0.0) for request in trace.ended),
        "prefill": {
            "seconds": prefill,
            "tokens_per_second": tokens_in / prefill,
            **phase(*snapshots[:2]),
        },
        "decode": decode_figures(ends, args.requests, *snapshots[2:]),
    }


def phase(before: EngineStatistics, after: EngineStatistics) -> dict[str, Any]:
    """Counters of a phase; "no_overlap" has those reasons that occurred."""
    reasons = {
        str(reason): count - before.no_overlap[reason]
        for reason, count in after.no_overlap.items()
        if count > before.no_overlap[reason]
    }
    steps = after.steps - before.steps
    captured = (after.captured_steps - before.captured_steps) / max(steps, 1)
    counts = {"steps": steps, "captured_share": captured, "no_overlap": reasons}
    return counts | counted(before, after)


def decode_figures(
    ends: Sequence[float], rows: int, before: EngineStatistics, after: EngineStatistics
) -> dict[str, Any] | None:
    """Figures of the steps between `ends`, seconds, which had `rows` rows each; None: no steps."""
    if len(ends) < 2:
        return None
    singles = [1e3 * (end - begin) for begin, end in itertools.pairwise(ends)]
    median = statistics.median(singles)
    return {
        "step_ms": median,
        "mean_step_ms": statistics.fmean(singles),
        "step_p99_ms": distribution(singles)["p99"],
        "tokens_per_second": 1e3 * rows / median,
        **phase(before, after),
    }


def profile_gaps(
    model: str, lookahead: int, has_decode: bool, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Gap reports of steps from the middle of prefill on and, if `has_decode`, of decode.

    A process that has profiled once launches more slowly from then on, so this comes last.
    """
    gaps = {}
    with open_engine(model, lookahead, args) as llm:
        trace, counters = start(llm.engine, args), llm.engine.statistics
        half = counters.prefill_tokens + args.requests * args.prompt_tokens // 2

        def run() -> None:
            for _ in range(args.profile_steps):
                trace.step()

        while counters.prefill_tokens < half:
            trace.step()
        gaps["prefill"] = asdict(gap_report(device_activities(profile_device(run)), FIRST_KERNEL))
        while trace.is_prefilling:
            trace.step()
        for _ in range(FIRST_DECODE_STEPS):
            trace.step()
        if has_decode:
            gaps["decode"] = asdict(
                gap_report(device_activities(profile_device(run)), FIRST_KERNEL)
            )
        trace.finish()
    return gaps


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["dummy:nemotron-3-nano-30b"])
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--requests", type=int, default=64, help="default 64")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="default 2048")
    parser.add_argument("--output-tokens", type=int, default=256, help="default 256")
    parser.add_argument(
        "--arrive-every", type=int, default=0, metavar="STEPS", help="default 0: all at once"
    )
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a step (default 2048)")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    add_model_options(parser)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="after all timings, profile the GPU's idle time between steps of both phases",
    )
    parser.add_argument("--profile-steps", type=int, default=30, help="default 30")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    return parser


def phase_line(found: dict[str, Any]) -> str:
    """What both phases report."""
    cpu = ", ".join(
        f"{name} {found[name + '_us']:.0f}" for name in ("prepare", "launch", "resolve")
    )
    reasons = f" ({found['no_overlap']})" if found["no_overlap"] else ""
    return (
        f"{found['tokens_per_second']:>12.0f} tokens/s{found['steps']:>7} steps, "
        f"{found['captured_share']:.0%} captured, {found['rows']:.1f} rows, overlap "
        f"{found['overlap_ratio']:.3f}{reasons}; CPU us: {cpu}"
    )


def print_row(row: dict[str, Any]) -> None:
    """One engine's figures."""
    prefill, decode = row["prefill"], row["decode"]
    print(f"{row['model']}, lookahead {row['lookahead']}: {row['total_s']:.3f} s in all")
    print(f"  prefill {prefill['seconds']:>11.3f} s      {phase_line(prefill)}")
    if decode is None:
        print("  decode: no step had a row of every request: raise --output-tokens")
    else:
        print(f"  decode  {decode['step_ms']:>11.3f} ms/step{phase_line(decode)}")
    print(f"  first tokens: median {row['ttft_ms']['p50']:.1f} ms", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures and, with --json, write them."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    args.models = routed(args.models, args.routing)
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile needs a CUDA device, and torch finds none: leave it out.")
    figures: list[dict[str, Any]] = []
    for model, lookahead in itertools.product(args.models, args.lookahead):
        found = measure(model, lookahead, args)
        figures.append({"model": model, "lookahead": lookahead, **found})
        print_row(figures[-1])
    for row in figures if args.profile else ():
        key = row["model"], row["lookahead"], row["decode"] is not None
        for name, gaps in profile_gaps(*key, args).items():
            row[name] |= {"gaps": gaps}
            print(f"{row['model']}, lookahead {row['lookahead']}, {name}: {GapReport(**gaps)}")
    if args.json:
        write_record(args.json, "trace", vars(args), figures)


if __name__ == "__main__":
    main()
