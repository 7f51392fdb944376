"""Time mixed steps by size: decode rows, and prompts that fill the step up to so many tokens.

Every step has the same decode rows, and new prompts of about --prompt-tokens tokens each, which end
with their first token. The first line is of decode rows alone. `prompt us` is the time that a
prompt token adds to it. So the table says what a step of each size costs, which sizes the device
serves badly, and how long running requests wait for prompts (`mixed_step_tokens`).

A device that is held at its power limit is slower than in a short burst: steps are timed in a row,
rounds of all sizes by turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from copy import deepcopy
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from step_times import time_steps

from engine_loads.options import add_model_options, cells, heads, load_parser, open_model, routed
from megatron_async import LLM
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.workloads import greedy, start_steady_decode, steady_decode_tokens

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine

BLOCK_SIZE = 64
FIRST_STEPS = 6
"""Mixed steps before those that are timed."""
HELD_STEPS = 3
"""Steps whose prompts hold blocks at once: in flight, or planned; and one to spare."""
COLUMNS = {
    "step_ms": "step ms",
    "token_us": "token us",
    "prompt_us": "prompt us",
    "launch_us": "launch us",
}


class MixedSteps:
    """Prompts of the given lengths that arrive before each step and fill it."""

    def __init__(self, engine: DynamicInferenceEngine, lengths: Sequence[int], seed: int) -> None:
        self._engine = engine
        self._random = np.random.default_rng(seed)
        self._lengths = lengths
        self._ids = count(1 << 32)  # decode rows are numbered from 0 on

    def before_step(self) -> None:
        """The step's arrivals."""
        vocabulary = self._engine.controller.vocab_size
        for length in self._lengths:
            prompt = self._random.integers(vocabulary, size=length)
            self._engine.add_request(next(self._ids), prompt, greedy(1))


def prompt_lengths(tokens: int, mean: int) -> list[int]:
    """Lengths of prompts of about `mean` tokens each that have so many tokens together."""
    prompts = max(1, round(tokens / mean))
    short, longer = divmod(tokens, prompts)
    lengths = [short + 1] * longer + [short] * (prompts - longer)
    return [length for length in lengths if length]


def blocks_of(lengths: Sequence[int]) -> int:
    """KV blocks of such prompts, each with its first token."""
    return sum(length // BLOCK_SIZE + 1 for length in lengths)


def open_engine(model: str, args: argparse.Namespace) -> LLM:
    """A model with room for the largest step."""
    most = max(*args.tokens, args.max_requests)
    steps = FIRST_STEPS + args.steps
    decoded = steady_decode_tokens(args.decode_rows, args.context_tokens, most, steps)
    longest = max(args.context_tokens + decoded, most)
    arrivals = [prompt_lengths(size - args.decode_rows, args.prompt_tokens) for size in args.tokens]
    # Prompts hold blocks from their arrival to the resolve of their step.
    held = HELD_STEPS * max(map(blocks_of, arrivals))
    # And one that an admission leaves for each row.
    decoding = (args.context_tokens + decoded) // BLOCK_SIZE + 2
    blocks = args.decode_rows * decoding + held
    settings = {"num_kv_blocks": blocks, "block_size_tokens": BLOCK_SIZE, "lookahead": 1}
    settings |= {
        "late_launch": False,  # arrivals are there before each step anyway
        "mixed_step_tokens": 2 * most,  # no limit
    }
    return open_model(model, args, args.max_requests, longest, most, **settings)


def measure(
    engine: DynamicInferenceEngine, tokens: int, args: argparse.Namespace
) -> dict[str, float]:
    """Figures of steps of so many tokens, on an idle engine, which is idle again afterwards;
    SystemExit if the steps had other numbers of prompt tokens."""
    wanted = tokens - args.decode_rows
    lengths = prompt_lengths(wanted, args.prompt_tokens)
    mixed = MixedSteps(engine, lengths, seed=tokens)
    steps = FIRST_STEPS + args.steps
    start_steady_decode(engine, args.decode_rows, args.context_tokens, steps)
    time_steps(engine, 1, FIRST_STEPS, mixed.before_step)
    before = deepcopy(engine.statistics)
    times = time_steps(engine, 1, args.steps, mixed.before_step)
    after = engine.statistics
    found = (after.prefill_tokens - before.prefill_tokens) / args.steps
    captured = (after.captured_steps - before.captured_steps) / args.steps
    while engine.has_unfinished_requests():
        engine.step_modern()
    if found != wanted:
        raise SystemExit(
            f"steps of {tokens} tokens had {found:g} prompt tokens instead of {wanted}: give more "
            "--max-requests (each prompt holds a slot until its step is resolved)."
        )
    shapes = engine.context.graph_shapes
    dims = shapes.find(args.decode_rows, len(lengths), wanted)
    padded = tokens if dims is None or not captured else dims.tokens
    return {
        "step_ms": times.step_ms,
        "launch_us": times.launch_us,
        "captured": captured,
        "padded_tokens": padded,
    }


def summary(
    rounds: Sequence[dict[str, float]], tokens: int, alone_ms: float, rows: int
) -> dict[str, float]:
    """Medians of several rounds of `measure`, and what a token costs, microseconds: beside
    `alone_ms`, a step of the decode rows alone."""
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    found["token_us"] = found["step_ms"] * 1e3 / tokens
    if tokens > rows:
        found["prompt_us"] = (found["step_ms"] - alone_ms) * 1e3 / (tokens - rows)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = load_parser("mixed", __doc__, several=True)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048],
        help="of a step, decode rows included",
    )  # fmt: skip
    parser.add_argument("--decode-rows", type=int, default=28)
    parser.add_argument(
        "--context-tokens", type=int, default=430, help="prompt of each decode row (default 430)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=228, help="of a prompt, about (default 228)"
    )
    parser.add_argument("--max-requests", type=int, default=256, help="slots (default 256)")
    parser.add_argument("--steps", type=int, default=24, help="timed in a round (default 24)")
    parser.add_argument("--rounds", type=int, default=3)
    add_model_options(parser)
    args = parser.parse_args(arguments)
    if args.decode_rows < 1 or min(args.tokens) <= args.decode_rows:
        parser.error(
            f"--tokens {min(args.tokens)} must be more than --decode-rows {args.decode_rows}, and "
            "these at least 1: a mixed step has both."
        )
    args.models = routed(args.models, args.routing)
    print(f"{'model':<28}{'tokens':>7}{'padded':>8}{'captured':>10}" + heads(COLUMNS.values(), 11))
    figures = []
    for model in args.models:
        with open_engine(model, args) as llm:
            sizes = [args.decode_rows, *args.tokens]
            rounds = [
                {size: measure(llm.engine, size, args) for size in sizes}
                for _ in range(args.rounds)
            ]
        alone = statistics.median(each[args.decode_rows]["step_ms"] for each in rounds)
        for size in sizes:
            row = summary([each[size] for each in rounds], size, alone, args.decode_rows)
            figures.append({"model": model, "tokens": size, **row})
            shape = f"{row['padded_tokens']:>8.0f}{row['captured']:>10.2f}"
            print(f"{model:<28}{size:>7}{shape}{cells(row, COLUMNS, 11)}", flush=True)
    if args.json:
        write_record(args.json, "mixed", vars(args), figures)
