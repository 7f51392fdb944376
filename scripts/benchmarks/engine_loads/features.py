"""What each feature of a request costs in steady decode, beside plain greedy requests.

Every request of the batch has the feature. On one engine features are timed in turn, round after
round, so that a machine's moods hit all alike; the figures are medians over the rounds. CPU time is
the engine's own thread's (prepare, launch and resolve).
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from step_times import time_steps

from engine_loads.options import ONE_SHAPE, cells, heads, load_parser, open_model
from megatron_async import LLM, SamplingParams
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.workloads import start_steady_decode, steady_decode_tokens

Load = Callable[[int], SamplingParams]
"""How a row samples."""
MAX_TOKENS = 8192
LOG_PROBS: dict[str, Any] = {"return_log_probs": True, "skip_prompt_log_probs": True}
PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.05,
}
EDITS: dict[str, Any] = {"logit_bias": {token: 0.5 for token in range(32)}, "min_tokens": 16}
BAD_WORDS: dict[str, Any] = {"bad_words": [[token, token + 1] for token in range(8)]}
TOGETHER: dict[str, Any] = {**LOG_PROBS, **PENALTIES, **EDITS, **BAD_WORDS, "top_n_logprobs": 5}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "log probs": LOG_PROBS,
    "top 5 log probs": {**LOG_PROBS, "top_n_logprobs": 5},
    "top 20 log probs": {**LOG_PROBS, "top_n_logprobs": 20},
    "processed log probs": {**LOG_PROBS, "logprobs_mode": "processed"},
    "penalties": PENALTIES,
    "logit bias, min tokens": EDITS,
    "bad words": BAD_WORDS,
    "all of them, top 5": TOGETHER,
}
ONE = "one row with all, the others plain"
COLUMNS = ("step_ms", "over_plain", "cpu_us", "cpu_over_plain", "overlap_ratio")


def open_engine(args: argparse.Namespace) -> LLM:
    """A model with room for the batch in steady decode."""
    steps = args.windows * args.steps
    tokens = steady_decode_tokens(args.batch_size, args.prompt_tokens, MAX_TOKENS, steps)
    length = args.prompt_tokens + tokens
    settings = {"lookahead": args.lookahead, **ONE_SHAPE}
    return open_model(args.model, args, args.batch_size, length, MAX_TOKENS, **settings)


def for_all(changes: dict[str, Any]) -> Load:
    """The same sampling for every row."""
    return lambda row: SamplingParams(temperature=0.0, **changes)


def measure(
    engine: DynamicInferenceEngine, args: argparse.Namespace, sampling_of: Load
) -> dict[str, float]:
    """Figures of one load, on an engine that is idle before and after."""
    steps = args.windows * args.steps
    start_steady_decode(engine, args.batch_size, args.prompt_tokens, steps, sampling=sampling_of)
    times = time_steps(engine, args.windows, args.steps)
    for request in range(args.batch_size):
        engine.abort_request(request)
    while engine.has_unfinished_requests():
        engine.step_modern()
    cpu_us = times.prepare_us + times.launch_us + times.resolve_us
    return {"step_ms": times.step_ms, "cpu_us": cpu_us, "overlap_ratio": times.overlap_ratio}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = load_parser("features", __doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="steps in each window (default 20)")
    parser.add_argument("--windows", type=int, default=3, help="windows a round (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    args = parser.parse_args(arguments)
    loads: dict[str, Load] = {name: for_all(changes) for name, changes in FEATURES.items()}
    loads[ONE] = lambda row: SamplingParams(temperature=0.0, **(TOGETHER if row == 0 else {}))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
    with open_engine(args) as llm:
        for _ in range(args.rounds):
            for name, sampling_of in loads.items():
                found[name].append(measure(llm.engine, args, sampling_of))
    figures: list[dict[str, Any]] = []
    for name, rounds in found.items():
        row = {key: statistics.median(figure[key] for figure in rounds) for key in rounds[0]}
        plain = figures[0] if figures else row
        figures.append({
            "feature": name,
            "model": args.model,
            "batch": args.batch_size,
            **row,
            "over_plain": row["step_ms"] / plain["step_ms"],
            "cpu_over_plain": row["cpu_us"] / plain["cpu_us"],
        })  # fmt: skip
    print_table(figures)
    if args.json:
        write_record(args.json, "features", vars(args), figures)


def print_table(figures: list[dict[str, Any]]) -> None:
    """One line a feature."""
    print(f"{'feature':<36}" + heads(COLUMNS, 16))
    for row in figures:
        print(f"{row['feature']:<36}" + cells(row, COLUMNS, 16))
