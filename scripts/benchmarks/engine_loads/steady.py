"""Time steady decode: shapes x batch sizes x lookahead, every request decoding; greedy unless a
temperature is given.

Reports the median step time of windows of steps, the share of steps launched ahead, and the CPU
time of the engine's own thread a step (a forward that runs eagerly launches its kernels from that
thread, and is counted under launch).

With --speculative-method steps draft and verify. Random weights and prompts never agree with a
draft, so --forced-acceptance says how often they do: the tokens are then not the model's.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict

from step_times import replay_ms, time_steps

from engine_loads.options import (
    ONE_SHAPE,
    add_draft_options,
    add_model_options,
    cells,
    decode_tokens,
    draft_settings,
    heads,
    load_parser,
    open_model,
    routed,
    settle_drafts,
)
from megatron_async import LLM, SamplingParams
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.forced_acceptance import force_acceptance
from megatron_async.lab.workloads import start_steady_decode, steady_decode_tokens
from megatron_async.ops.sampling.sampling import SamplingMode

WINDOWS = 5
MAX_TOKENS = 8192
COLUMNS = (
    "step_ms",
    "replay_ms",
    "over_replay",
    "tokens_per_second",
    "prepare_us",
    "launch_us",
    "resolve_us",
    "tokens_per_row",
)


def open_engine(model: str, batch: int, lookahead: int, args: argparse.Namespace) -> LLM:
    """A model with room for `batch` requests in steady decode."""
    steps = decode_tokens(args, WINDOWS * args.steps)
    max_tokens = max(MAX_TOKENS, batch * (1 + args.num_speculative_tokens))
    tokens = steady_decode_tokens(batch, args.prompt_tokens, max_tokens, steps)
    length = args.prompt_tokens + max(tokens, steps + 64)
    settings = {"enable_prefix_caching": True, "lookahead": lookahead, **draft_settings(args)}
    llm = open_model(model, args, batch, length, max_tokens, **settings, **ONE_SHAPE)
    if args.forced_acceptance is not None:
        force_acceptance(llm.engine, args.forced_acceptance)
    return llm


def measure(
    model: str, batch: int, lookahead: int, sampling: SamplingParams, args: argparse.Namespace
) -> dict[str, float]:
    """Figures of one engine, whose memory is free again afterwards."""
    mode = SamplingMode.GREEDY if sampling.temperature == 0 else SamplingMode.FILTERED
    with open_engine(model, batch, lookahead, args) as llm:
        steps = decode_tokens(args, WINDOWS * args.steps)
        start_steady_decode(llm.engine, batch, args.prompt_tokens, steps, sampling=sampling)
        result = asdict(time_steps(llm.engine, WINDOWS, args.steps))
        result["tokens_per_row"] = (
            result["tokens_per_second"] * result["step_ms"] / 1e3 / result["rows"]
        )
        width = 1 if args.forced_acceptance is None else 1 + args.num_speculative_tokens
        limit = replay_ms(llm.engine, batch, mode, width=width)
    if limit is not None:
        result |= {"replay_ms": limit, "over_replay": result["step_ms"] / limit}
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = load_parser("steady", __doc__, several=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=20, help=f"steps in each of {WINDOWS} windows (default 20)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=0.0)
    add_draft_options(parser)
    add_model_options(parser)
    args = parser.parse_args(arguments)
    settle_drafts(args)
    args.models = routed(args.models, args.routing)
    sampling = SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    print(f"{'model':<22}{'batch':>6}{'lookahead':>10}" + heads(COLUMNS, 19))
    figures = []
    for model, batch, lookahead in itertools.product(args.models, args.batch_sizes, args.lookahead):
        result = measure(model, batch, lookahead, sampling, args)
        figures.append({"model": model, "batch": batch, "lookahead": lookahead, **result})
        print(f"{model:<22}{batch:>6}{lookahead:>10}{cells(result, COLUMNS, 19)}", flush=True)
        if args.json:  # after each engine: what is measured is kept if the next one fails
            write_record(args.json, "decode", vars(args), figures)
