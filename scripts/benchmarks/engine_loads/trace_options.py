"""Options of requests that arrive at random: when, how many, how long."""

from __future__ import annotations

import argparse

from megatron_async.profiling.arrival_trace import (
    LengthDistribution,
    TraceRequest,
    poisson_trace,
)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add what `make_trace` reads, and `--rate`, `--num-requests`, `--seed` and
    `--warmup-requests`."""
    trace = parser.add_argument_group("trace")
    trace.add_argument(
        "--rate", type=float, nargs="+", default=[8.0], help="arrivals a second (default 8)"
    )
    trace.add_argument("--num-requests", type=int, default=256, help="of a trace (default 256)")
    trace.add_argument("--prompt-mean", type=float, default=256.0, help="tokens (default 256)")
    trace.add_argument("--output-mean", type=float, default=128.0, help="tokens (default 128)")
    trace.add_argument("--max-prompt-tokens", type=int, default=1024, help="default 1024")
    trace.add_argument("--max-output-tokens", type=int, default=512, help="default 512")
    trace.add_argument(
        "--length-sigma",
        type=float,
        default=0.6,
        help="standard deviation of the lengths' logarithm (default 0.6; 0: all equal)",
    )
    trace.add_argument("--seed", type=int, default=0, help="of the whole trace (default 0)")
    trace.add_argument("--warmup-requests", type=int, default=32, help="default 32")


def make_trace(
    args: argparse.Namespace, vocab_size: int, rate: float, count: int, seed: int
) -> list[TraceRequest]:
    """`count` requests with the lengths of the command line."""
    prompts = LengthDistribution(args.prompt_mean, args.max_prompt_tokens, args.length_sigma)
    outputs = LengthDistribution(args.output_mean, args.max_output_tokens, args.length_sigma)
    return poisson_trace(rate, count, prompts, outputs, vocab_size, seed)
