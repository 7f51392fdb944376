"""`megatron-async bench latency` and `throughput`: an engine of this process."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.interrupts import raise_interrupts
from megatron_async.cli.options import engine_options
from megatron_async.cli.terminal import STARTING, said_meanwhile

if TYPE_CHECKING:
    from megatron_async.llm import LLM
    from megatron_async.profiling.arrival_trace import TraceRequest
    from megatron_async.profiling.trace_server import ServedTrace


def measure_engine(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Serve batches, or many requests at once, by an engine of this process.

    Returns:
        what was measured, in words, and its figures; units stand in the names.
    """
    is_latency = arguments.kind == "latency"
    sigma = 0.0 if is_latency else arguments.length_sigma
    longest_in, longest_out = (
        length if sigma == 0 else 4 * length
        for length in (arguments.input_len, arguments.output_len)
    )
    options = engine_options(arguments)
    check_early(arguments.model, options)

    with said_meanwhile(STARTING):
        from megatron_async.llm import LLM
        from megatron_async.profiling.arrival_trace import LengthDistribution, poisson_trace

    options.setdefault("max_sequence_length", longest_in + longest_out)
    progress = not arguments.no_progress and sys.stderr.isatty()
    with LLM(arguments.model, dtype=arguments.dtype, progress=progress, **options) as llm:
        raise_interrupts()
        count = arguments.batch_size if is_latency else arguments.num_prompts

        def trace(seed: int, count: int = count) -> list[TraceRequest]:
            return poisson_trace(
                math.inf, count, LengthDistribution(arguments.input_len, longest_in, sigma),
                LengthDistribution(arguments.output_len, longest_out, sigma),
                llm.engine.controller.vocab_size, seed,
            )  # fmt: skip

        where = f"{arguments.model} on {llm.engine.context.device.torch_device}"
        if is_latency:
            served = [_served(llm, trace(arguments.seed), progress, "warm-up")]
            served = [
                _served(llm, trace(arguments.seed + 1 + number), progress, f"batch {number + 1}")
                for number in range(arguments.repeats)
            ]
            title = (
                f"{where}: batches of {count}, {arguments.input_len} tokens in, "
                f"{arguments.output_len} out, {arguments.repeats} times"
            )
        else:
            warm_up = trace(arguments.seed + 1, min(count, 8))
            _served(llm, warm_up, progress, "warm-up")
            served = [_served(llm, trace(arguments.seed), progress, "requests")]
            title = f"{where}: {count} requests at once"
    return title, _figures(served)


def _served(llm: LLM, trace: Sequence[TraceRequest], progress: bool, what: str) -> ServedTrace:
    from tqdm import tqdm

    from megatron_async.profiling.trace_server import serve_trace

    with tqdm(
        total=len(trace), unit="request", desc=what, disable=None if progress else True, leave=False
    ) as bar:

        def show(finished: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens} tokens", refresh=False)
            bar.update(finished)

        return serve_trace(llm.engine, trace, show)


def _figures(runs: Sequence[ServedTrace]) -> dict[str, Any]:
    from megatron_async.profiling.benchmark_record import distribution

    requests = [request for run in runs for request in run.requests]
    seconds = sum(run.duration_s for run in runs)
    steps = sum(run.steps for run in runs)
    return {
        "ttft_ms": distribution(1e3 * r.ttft_s for r in requests),
        "tpot_ms": distribution(1e3 * r.tpot_s for r in requests if r.tpot_s is not None),
        "latency_ms": distribution(1e3 * r.latency_s for r in requests),
        "duration_s": seconds,
        "requests_per_second": len(requests) / seconds,
        "tokens_in_per_second": sum(r.prompt_tokens for r in requests) / seconds,
        "tokens_out_per_second": sum(len(r.tokens) for r in requests) / seconds,
        "overlap_ratio": sum(run.overlap_ratio * run.steps for run in runs) / max(steps, 1),
    }
