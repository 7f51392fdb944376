"""Time steady decode of a model on several ranks. Start it with torchrun:

    torchrun --nproc-per-node 4 scripts/benchmarks/benchmark_engine.py ranks \
        --model dummy:llama-3.1-8b --tensor-model-parallel-size 4

Every replica decodes a batch of its own, driven by its primary rank, which the others follow. Step
times are medians over windows of steps; beside them stands the captured step replayed back to back
on all ranks at once, the limit, and what the CPUs' agreement took of the thread that launches.
With --speculative-method steps draft and verify, as under the load steady.
With --profile the GPU's idle time between steps is read from the kernel timeline of rank 0.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from step_times import captured_by_nsys, replay_ms, time_steps

from engine_loads.options import (
    ONE_SHAPE,
    add_draft_options,
    add_model_options,
    cells,
    decode_tokens,
    draft_settings,
    gaps_of,
    heads,
    load_parser,
    open_model,
    routed,
    settle_drafts,
)
from megatron_async import LLM
from megatron_async.cli.options import add_parallel, parallel_sizes
from megatron_async.communication.bootstrap import join_job
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.forced_acceptance import force_acceptance
from megatron_async.lab.workloads import start_steady_decode, steady_decode_tokens

WINDOWS = 5
MAX_TOKENS = 8192
PROFILED_STEPS = 40
COLUMNS = (
    "step_ms", "replay_ms", "over_replay", "tokens_per_second", "prepare_us", "launch_us",
    "resolve_us", "tokens_per_row", "agreement_us", "gap_us", "gap_p99_us", "pipeline_bubble",
)  # fmt: skip


def open_llm(batch: int, lookahead: int, args: argparse.Namespace) -> LLM:
    """This rank's part of the model, with room for `batch` requests in steady decode."""
    steps = decode_tokens(args, WINDOWS * args.steps + PROFILED_STEPS)
    max_tokens = max(MAX_TOKENS, batch * (1 + args.num_speculative_tokens))
    tokens = steady_decode_tokens(batch, args.prompt_tokens, max_tokens, steps)
    length = args.prompt_tokens + max(tokens, steps + 64)
    settings = {"lookahead": lookahead, "check_ranks_agree": args.check_ranks_agree}
    settings |= {**ONE_SHAPE, **draft_settings(args), **parallel_sizes(args)}
    llm = open_model(args.model, args, batch, length, max_tokens, **settings)
    if args.forced_acceptance is not None:
        force_acceptance(llm.engine, args.forced_acceptance)
    return llm


def measure(batch: int, lookahead: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one engine; only those of rank 0 count."""
    result: dict[str, Any] = {}
    with open_llm(batch, lookahead, args) as llm:
        engine = llm.engine
        if llm.is_primary_rank:
            steps = WINDOWS * args.steps + (PROFILED_STEPS if args.profile else 0)
            engine.group.begin_together()
            tokens = decode_tokens(args, steps)
            start_steady_decode(engine, batch, args.prompt_tokens, tokens)
            waited, rounds = engine.group.agreement_ns, engine.statistics.steps
            result = asdict(time_steps(engine, WINDOWS, args.steps))
            waited, rounds = engine.group.agreement_ns - waited, engine.statistics.steps - rounds
            per_step = result["tokens_per_second"] * result["step_ms"] / 1e3
            result["tokens_per_row"] = per_step / max(result["rows"], 1)
            result["agreement_us"] = waited / 1e3 / max(rounds, 1)
            result["pipeline_bubble"] = engine.stats()["pipeline_bubble"]
            if args.profile:
                result |= idle_time(llm)
            engine.group.release()
        else:
            with captured_by_nsys():
                engine.follow()
        # A step of a pipeline serves its share of the requests.
        width = 1 if args.forced_acceptance is None else 1 + args.num_speculative_tokens
        own = replay_ms(engine, -(-batch // args.pipeline_model_parallel_size), width=width)
        # Stages of a pipeline differ, and the slowest is the limit; others replay together.
        limits = join_job().exchange("replays", str(own or 0.0)).values()
        limit = max(map(float, limits))
    if limit and result:
        result |= {"replay_ms": limit, "over_replay": result["step_ms"] / limit}
    return result


def idle_time(llm: LLM) -> dict[str, Any]:
    """The gap report of rank 0; other leaders run the same steps without a profiler."""
    if join_job().rank > 0:
        for _ in range(PROFILED_STEPS):
            llm.engine.step_modern()
        return {}
    found = gaps_of(llm.engine.step_modern, PROFILED_STEPS)
    return {"gap_us": found.gap_us, "gap_p99_us": found.gap_p99_us, "kernels": found.kernels}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table on rank 0 and, with --json, write the figures."""
    parser = load_parser("ranks", __doc__, model="dummy:tiny")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="steps in each of 5 windows")
    parser.add_argument("--profile", action="store_true", help="the GPU's idle time, too")
    parser.add_argument("--check-ranks-agree", action="store_true", help="compare all plans")
    add_draft_options(parser)
    add_model_options(parser)
    add_parallel(parser)
    args = parser.parse_args(arguments)
    settle_drafts(args)
    (args.model,) = routed([args.model], args.routing)
    is_first, figures = os.environ.get("RANK", "0") == "0", []
    if is_first:
        print(f"{'batch':>6}{'lookahead':>10}" + heads(COLUMNS, 18))
    for batch in args.batch_sizes:
        for lookahead in args.lookahead:
            result = measure(batch, lookahead, args)
            if not is_first:
                continue
            figures.append({"batch": batch, "lookahead": lookahead, **result})
            print(f"{batch:>6}{lookahead:>10}{cells(result, COLUMNS, 18)}", flush=True)
            if args.json:
                settings = vars(args) | {"world_size": join_job().world_size}
                write_record(args.json, "ranks", settings, figures)
