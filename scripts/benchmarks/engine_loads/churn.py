"""Time decode under churn: requests end and arrive in every step, beside steady decode.

At each step `--finishes-per-step` requests end and as many arrive with prompts of `--prompt-tokens`
tokens, so that every step has `--batch-size` rows and most are mixed steps; a request lives for
batch size / finishes steps. Steady decode of the same batch is timed on the same engine afterwards.
Arrivals are added between steps, and their time counts. Step times are medians over 5 windows of
steps; the percentiles are of single steps.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from step_times import time_steps

from engine_loads.options import (
    add_model_options,
    cells,
    gaps_of,
    heads,
    load_parser,
    open_model,
    routed,
)
from megatron_async import LLM
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.workloads import Churn, start_steady_decode, steady_decode_tokens

WINDOWS = 5
BLOCK_SIZE = 64
COLUMNS = {
    "step_ms": "step ms",
    "step_p50_ms": "p50",
    "step_p90_ms": "p90",
    "step_p99_ms": "p99",
    "tokens_per_second": "tokens/s",
    "overlap_ratio": "overlap",
    "zombie_rows": "zombies",
    "prepare_us": "prepare us",
    "launch_us": "launch us",
    "resolve_us": "resolve us",
}
GAP_COLUMNS = {"gap_us": "gap us", "gap_p99_us": "gap p99", "busy_share": "busy"}


def open_engine(model: str, lookahead: int, args: argparse.Namespace) -> LLM:
    """A model with room for the churn and for steady decode."""
    batch, prompt, finishes = args.batch_size, args.prompt_tokens, args.finishes_per_step
    slots = Churn.slots(batch, finishes, lookahead)
    max_tokens = max(args.max_tokens, Churn.step_tokens(batch, prompt, finishes))
    steps = max(WINDOWS * args.steps, args.profile_steps)
    longest = prompt + max(
        *Churn.lifetimes(batch, finishes), steady_decode_tokens(batch, prompt, max_tokens, steps)
    )
    blocks = (slots + finishes) * (longest // BLOCK_SIZE + 2)
    settings = {"lookahead": lookahead, "num_kv_blocks": blocks, "block_size_tokens": BLOCK_SIZE}
    return open_model(model, args, slots, longest, max_tokens, **settings)


def measure(model: str, lookahead: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of both loads on one engine, whose memory is free again afterwards."""
    with open_engine(model, lookahead, args) as llm:
        return {"churn": measure_churn(llm, args), "steady": measure_steady(llm, args)}


def measure_churn(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of churn; raises if another number of requests ends in a measured step."""
    churn = Churn(llm.engine, args.batch_size, args.prompt_tokens, args.finishes_per_step)
    churn.ramp_up()
    ended, arrived = churn.ended, churn.arrived
    times = time_steps(llm.engine, WINDOWS, args.steps, churn.before_step, churn.after_step)
    steps = WINDOWS * args.steps
    figures: dict[str, Any] = {
        **asdict(times),
        "finishes_per_step": (churn.ended - ended) / steps,
        "arrivals_per_step": (churn.arrived - arrived) / steps,
    }
    churn.drain()
    return figures


def measure_steady(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of steady decode at the same batch size, on an idle engine."""
    steps = WINDOWS * args.steps
    start_steady_decode(llm.engine, args.batch_size, args.prompt_tokens, steps)
    return asdict(time_steps(llm.engine, WINDOWS, args.steps))


def profile_gaps(model: str, lookahead: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Gap reports of both loads, on an engine of their own.

    A process that has profiled once launches more slowly from then on, so this comes last.
    """
    with open_engine(model, lookahead, args) as llm:
        engine = llm.engine
        churn = Churn(engine, args.batch_size, args.prompt_tokens, args.finishes_per_step)
        churn.ramp_up()

        def churn_step() -> None:
            churn.before_step()
            churn.after_step(engine.step_modern())

        gaps = {"churn": asdict(gaps_of(churn_step, args.profile_steps))}
        churn.drain()
        start_steady_decode(engine, args.batch_size, args.prompt_tokens, args.profile_steps)
        gaps["steady"] = asdict(gaps_of(engine.step_modern, args.profile_steps))
    return gaps


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = load_parser("churn", __doc__, several=True)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a step (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default 128")
    parser.add_argument(
        "--finishes-per-step",
        type=int,
        default=1,
        help="requests that end, and that arrive, in each step (default 1)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=512,
        help="token budget of a step, raised to what the load needs (default 512: mixed steps are "
        "captured for sizes up to it)",
    )
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, default=40, help=f"steps in each of {WINDOWS} windows (default 40)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="after all timings, profile the GPU's idle time between steps (gap: median, p99)",
    )
    parser.add_argument("--profile-steps", type=int, default=50, help="default 50")
    add_model_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    args.models = routed(args.models, args.routing)
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile needs a CUDA device, and torch finds none: leave it out.")
    print(
        f"batch {args.batch_size}, prompts of {args.prompt_tokens} tokens, "
        f"{args.finishes_per_step} end and arrive a step"
    )
    figures: list[dict[str, Any]] = []
    for model, lookahead in itertools.product(args.models, args.lookahead):
        found = measure(model, lookahead, args)
        ratio = found["churn"]["step_ms"] / found["steady"]["step_ms"]
        figures.append(
            {
                "model": model,
                "batch": args.batch_size,
                "lookahead": lookahead,
                "churn_over_steady": ratio,
                **found,
            }
        )
        print_figures(figures[-1:], COLUMNS)
    for row in figures if args.profile else ():
        for load, gaps in profile_gaps(row["model"], row["lookahead"], args).items():
            row[load] |= gaps
        print_figures([row], GAP_COLUMNS)
    if args.json:
        write_record(args.json, "churn", vars(args), figures)


def print_figures(figures: Sequence[dict[str, Any]], columns: dict[str, str]) -> None:
    """A table of both loads for each of `figures`."""
    header = f"{'model':<22}{'lookahead':>10}{'load':>8}"
    print(header + heads(columns.values(), 12))
    for row in figures:
        name = f"{row['model']:<22}{row['lookahead']:>10}"
        for load in ("churn", "steady"):
            print(f"{name}{load:>8}{cells(row[load], columns, 12)}")
        print(f"{name}   churn over steady: {row['churn_over_steady']:.3f}", flush=True)
