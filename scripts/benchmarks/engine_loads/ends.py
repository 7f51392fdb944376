"""Compare the invalidation policies: what requests that end unforeseen cost.

In each step every row ends with a given probability, by a stop token, and a new request takes its
place. "reconcile" drops the rows in flight of who ended; "rollback" discards the steps in flight
and launches them again. Both say the same tokens. Times are of steps that are kept: medians over 5
windows, those of the policies in turn; waste is counted over all of them.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from engine_loads.options import load_parser
from engine_loads.unforeseen_ends import UnforeseenEnds
from megatron_async import LLM
from megatron_async.profiling.benchmark_record import write_record

WINDOWS = 5
WARM_UP_STEPS = 10
BLOCK_SIZE = 64
POLICIES = ("reconcile", "rollback")
COLUMNS = {
    "step_ms": ("step ms", 10, ".3f"),
    "tokens_per_second": ("tokens/s", 11, ".0f"),
    "ends_per_row": ("ends/row", 10, ".3f"),
    "wasted_row_share": ("wasted rows", 13, ".1%"),
    "discarded_step_share": ("discarded", 11, ".1%"),
    "overlap_ratio": ("overlap", 9, ".2f"),
}


def open_engine(model: str, policy: str, lookahead: int, args: argparse.Namespace) -> LLM:
    """A model with room for the load."""
    longest = args.prompt_tokens + most_tokens(args)
    return LLM(
        model,
        enable_prefix_caching=False,  # prompts come again, and all of them are to be computed
        device=args.device,
        dtype=args.dtype,
        lookahead=lookahead,
        invalidation=policy,
        max_requests=args.batch_size,
        max_tokens=args.batch_size * (args.prompt_tokens + 1),
        max_sequence_length=longest,
        num_kv_blocks=args.batch_size * (longest // BLOCK_SIZE + 2),
        block_size_tokens=BLOCK_SIZE,
    )


def most_tokens(args: argparse.Namespace) -> int:
    """Tokens that a request may generate: as many as there are steps, so that none ends at a rate
    of 0."""
    return WARM_UP_STEPS + WINDOWS * args.steps + 16


class Runner:
    """One policy's engine under the load, and what its windows showed."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm = llm
        self.load = UnforeseenEnds(
            llm.engine, args.batch_size, args.prompt_tokens, most_tokens(args)
        )

    def start(self, rate: float) -> None:
        """Fill the idle engine and warm it up."""
        self.load.start(rate)
        run_steps(self.llm, self.load, WARM_UP_STEPS)
        self._before = copy.deepcopy(self.llm.engine.statistics)
        self._ended = self.load.ended
        self._windows: list[tuple[float, int]] = []

    def run_window(self, steps: int) -> None:
        """Time so many steps that are kept."""
        self._windows.append(run_steps(self.llm, self.load, steps))

    def finish(self) -> dict[str, float]:
        """Empty the engine and return the figures."""
        counters, before = self.llm.engine.statistics, self._before
        kept = counters.resolved_steps - before.resolved_steps
        tokens = counters.generated_tokens - before.generated_tokens
        launched = counters.steps - before.steps
        discarded_steps = counters.discarded_steps - before.discarded_steps
        discarded_rows = counters.discarded_rows - before.discarded_rows
        zombie_rows = counters.zombie_rows - before.zombie_rows
        step = statistics.median(time / steps for time, steps in self._windows)
        figures = {
            "step_ms": 1e3 * step,
            "tokens_per_second": tokens / kept / step,
            "rows": tokens / kept,
            "ends_per_row": (self.load.ended - self._ended) / tokens,
            "zombie_rows": zombie_rows,
            "discarded_rows": discarded_rows,
            "discarded_steps": discarded_steps,
            "wasted_row_share": (zombie_rows + discarded_rows) / (counters.rows - before.rows),
            "discarded_step_share": discarded_steps / launched,
            "overlap_ratio": (counters.overlapped_steps - before.overlapped_steps) / launched,
        }
        self.load.stop()
        return figures


def compare(
    model: str, lookahead: int, args: argparse.Namespace
) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Policy, rate and figures; the policies' windows alternate, so that what else the machine does
    meets both."""
    with ExitStack() as stack:
        runners = {
            policy: Runner(stack.enter_context(open_engine(model, policy, lookahead, args)), args)
            for policy in args.policies
        }
        for rate in args.rates:
            for runner in runners.values():
                runner.start(rate)
            for _ in range(WINDOWS):
                for runner in runners.values():
                    runner.run_window(args.steps)
            for policy, runner in runners.items():
                yield policy, rate, runner.finish()


def run_steps(llm: LLM, load: UnforeseenEnds, steps: int) -> tuple[float, int]:
    """Run until so many steps are kept; seconds that it took, and steps kept."""
    counters, start = llm.engine.statistics, time.perf_counter()
    first = counters.resolved_steps
    while counters.resolved_steps < first + steps:
        load.step()
    return time.perf_counter() - start, counters.resolved_steps - first


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = load_parser("ends", __doc__, several=True)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a step (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="default 16")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5],
        help="probabilities with which a row ends in a step (default 0 to 0.5)",
    )
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument(
        "--steps", type=int, default=40, help=f"steps in each of {WINDOWS} windows (default 40)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    args = build_parser().parse_args(arguments)
    print(f"batch {args.batch_size}, prompts of {args.prompt_tokens} tokens")
    header = f"{'model':<20}{'policy':>11}{'lookahead':>11}{'rate':>7}"
    print(header + "".join(f"{title:>{width}}" for title, width, _ in COLUMNS.values()))
    figures: list[dict[str, Any]] = []
    for model, lookahead in itertools.product(args.models, args.lookahead):
        for policy, rate, found in compare(model, lookahead, args):
            key = {"model": model, "batch": args.batch_size, "lookahead": lookahead}
            figures.append({**key, "policy": policy, "rate": rate, **found})
            cells = "".join(
                f"{found[name]:>{width}{form}}" for name, (_, width, form) in COLUMNS.items()
            )
            print(f"{model:<20}{policy:>11}{lookahead:>11}{rate:>7.0%}{cells}", flush=True)
    if args.json:
        write_record(args.json, "invalidation", vars(args), figures)
