"""Serve requests that arrive at random, in real time: latencies and throughput by rate.

Arrivals are a Poisson process; lengths are lognormal with the given means. One seed gives the same
requests at every rate, and the very same trace to every lookahead. Arrival times are honoured by
the wall clock, also while steps are in flight, and every latency counts from the trace's arrival:
  queue     until the request got a slot
  TTFT      until its first token was on the host
  TPOT      time for each output token after the first
  latency   until its last token
Throughput is tokens over the time from the trace's start to the last request's end. Where the
offered load is more than the engine can serve, latencies grow with the number of requests and say
nothing but that.
"""

import argparse
import gc
import itertools
import math
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from engine_loads.options import (
    add_model_options,
    add_trace_options,
    load_parser,
    make_trace,
    open_model,
    routed,
)
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.trace_server import ServedTrace, latency_lines, serve_trace, summarize

BLOCK_SIZE = 64


def serve_rates(lookahead: int, args: argparse.Namespace) -> list[tuple[float, ServedTrace]]:
    """Serve the trace at every rate on one engine, after a warm-up."""
    longest = args.max_prompt_tokens + args.max_output_tokens
    blocks = args.max_requests * -(-longest // BLOCK_SIZE)
    settings = {"progress": not args.no_progress, "lookahead": lookahead}
    settings |= {"num_kv_blocks": args.num_kv_blocks or blocks, "block_size_tokens": BLOCK_SIZE}
    with open_model(
        args.model, args, args.max_requests, longest, args.max_tokens, **settings
    ) as llm:
        vocabulary = llm.engine.controller.vocab_size
        # Kernels are compiled and memory is taken before the clock starts: all at once, so that
        # the batch passes through many sizes on its way down.
        warm_up = make_trace(args, vocabulary, math.inf, args.warmup_requests, args.seed + 1)
        serve_trace(llm.engine, warm_up)
        results = []
        for rate in args.rate:
            trace = make_trace(args, vocabulary, rate, args.num_requests, args.seed)
            with tqdm(
                total=len(trace),
                unit="request",
                desc=f"{rate:g}/s, lookahead {lookahead}",
                disable=args.no_progress or None,
            ) as bar:

                def show(finished: int, tokens: int, bar: Any = bar) -> None:
                    bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                    bar.update(finished)

                results.append((rate, serve_trace(llm.engine, trace, show)))
        return results


def same_tokens(served: ServedTrace, first: ServedTrace) -> int:
    """Requests with the same tokens in both."""
    pairs = zip(served.requests, first.requests, strict=True)
    return sum(a.tokens == b.tokens for a, b in pairs)


def print_table(figures: Sequence[dict[str, Any]]) -> None:
    """All figures, the lookaheads of a rate side by side."""
    key = f"{'rate/s':>8}{'lookahead':>10}"
    print(
        f"\n{key}{'served/s':>10}{'tok/s in':>11}{'tok/s out':>11}{'rows':>7}{'overlap':>9}"
        f"{'waiting, most':>15}{'mean':>7}{'late ms':>9}{'same tokens':>13}"
    )
    for row in figures:
        print(
            f"{row['rate']:>8g}{row['lookahead']:>10}{row['requests_per_second']:>10.2f}"
            f"{row['tokens_in_per_second']:>11.0f}{row['tokens_out_per_second']:>11.0f}"
            f"{row['mean_rows']:>7.1f}{row['overlap_ratio']:>9.3f}{row['most_waiting']:>15}"
            f"{row['mean_waiting']:>7.1f}{row['late_ms']:>9.2f}"
            f"{row['same_tokens']:>7}/{row['requests']}"
        )
    print("\n" + "\n".join(latency_lines(figures)))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = load_parser("throughput", __doc__)
    add_trace_options(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    engine.add_argument("--max-requests", type=int, default=256, help="default 256")
    engine.add_argument("--max-tokens", type=int, default=2048, help="of a step (default 2048)")
    engine.add_argument(
        "--num-kv-blocks",
        type=int,
        default=None,
        help=f"of {BLOCK_SIZE} tokens (default: enough for --max-requests of the longest)",
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")
    add_model_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and, with --json, write the figures."""
    args = build_parser().parse_args(arguments)
    (args.model,) = routed([args.model], args.routing)
    served: dict[tuple[float, int], ServedTrace] = {}
    for lookahead in args.lookahead:
        for rate, result in serve_rates(lookahead, args):
            served[rate, lookahead] = result
        gc.collect()  # the engine's memory, before the next one takes its own
    figures = []
    for rate, lookahead in itertools.product(args.rate, args.lookahead):
        result = served[rate, lookahead]
        figures.append(
            {
                "model": args.model,
                "rate": rate,
                "lookahead": lookahead,
                "requests": len(result.requests),
                "same_tokens": same_tokens(result, served[rate, args.lookahead[0]]),
                **summarize(result),
            }
        )
    print_table(figures)
    if args.json:
        write_record(args.json, "throughput", vars(args), figures)
