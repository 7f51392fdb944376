"""What a prefix cache brings, and what it costs where nothing is shared.

Loads, each with figures of its own:

tail       Time to the first token of prompts of --prefix-tokens that are cached and a tail of their
           own, beside the step that computes the same tail as a chunk after the same tokens
           (lookahead 0, no cache). Target: at most 1.1 of it.
turns      One conversation of --turns turns, --turn-tokens new tokens and as many in answer each:
           tokens computed, and time to the first token, a turn.
unique     Prompts of --prefix-tokens that share nothing, all at once, with the cache and without by
           turns: tokens a second and time to the first token. Target: within 1 %.
snapshots  Time to the first token of a prompt whose scan leaves a snapshot of its states at every
           --interval tokens, beside one that leaves none (hybrid models). Target: at most 1.02.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from engine_loads.options import add_model_options, load_parser, routed
from megatron_async import LLM, DynamicInferenceRequest, SamplingParams
from megatron_async.lab.benchmark_record import write_record

BLOCK_SIZE = 64
WARM_UP = 2


def random_tokens(llm: LLM, count: int, seed: int) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = llm.engine.controller.vocab_size
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, termination_id=-1)


def serve(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[DynamicInferenceRequest]:
    """Serve prompts that are all there at once; each must succeed."""
    engine = llm.engine
    done = engine.generate(list(prompts), greedy(tokens))
    while engine.has_unfinished_requests():
        engine.step_modern()
    for request in done:
        if request.error is not None or request.ttft is None:
            raise SystemExit(f"a prompt of {len(request.prompt_tokens)} failed: {request.error}")
    return done


def ttft_ms(llm: LLM, prompt: list[int]) -> float:
    """Time to the first token of a prompt on an idle engine."""
    return 1e3 * (serve(llm, [prompt], 2)[0].ttft or 0.0)


def open_llm(model: str, args: argparse.Namespace, **settings: Any) -> LLM:
    """An engine with room for a few requests of this load."""
    longest = args.prefix_tokens + 2 * args.turns * args.turn_tokens + max(args.tails) + 64
    requests = settings.pop("max_requests", 8)
    return LLM(
        model,
        device=args.device,
        dtype=args.dtype,
        mamba_ssm_states_dtype=args.mamba_ssm_states_dtype,
        **{
            "max_requests": requests,
            "max_tokens": max(args.max_tokens, requests),
            "max_sequence_length": longest,
            "num_kv_blocks": (requests + 2) * -(-longest // BLOCK_SIZE),
            "block_size_tokens": BLOCK_SIZE,
            **settings,
        },
    )


def measure_tail(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the load "tail"."""
    rows = []
    with ExitStack() as stack:
        warm = stack.enter_context(open_llm(model, args, enable_prefix_caching=True))
        # The prompt is cut where the other's cached part ends.
        size = args.prefix_tokens
        cold = stack.enter_context(open_llm(model, args, lookahead=0, max_tokens=size))
        prefix = random_tokens(warm, size, seed=1)
        serve(warm, [[*prefix, 0]], 2)
        for tail in args.tails:
            found, chunks, cached = [], [], 0
            for number in range(args.repeats + WARM_UP):
                # No tail begins like one of another length, or it would be found too.
                prompt = [*prefix, *random_tokens(warm, tail, seed=100 * tail + number)]
                (request,) = serve(warm, [prompt], 2)
                found.append(1e3 * (request.ttft or 0.0))
                cached = request.num_cached_tokens or 0
                chunks.append(_second_step_ms(cold, prompt))
            row = {
                "tail": tail,
                "cached": cached,
                "warm_ttft_ms": statistics.median(found[WARM_UP:]),
                "chunk_ms": statistics.median(chunks[WARM_UP:]),
            }
            rows.append(row | {"ratio": row["warm_ttft_ms"] / row["chunk_ms"]})
    return rows


def _second_step_ms(llm: LLM, prompt: list[int]) -> float:
    """Of a serial engine, the step that prefills the second chunk of a prompt."""
    engine = llm.engine
    engine.add_request(0, prompt, greedy(1))
    engine.step_modern()
    begin = time.perf_counter()
    engine.step_modern()
    took = time.perf_counter() - begin
    while engine.has_unfinished_requests():
        engine.step_modern()
    return 1e3 * took


def measure_turns(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the load "turns"."""
    rows = []
    with open_llm(model, args, enable_prefix_caching=True) as llm:
        serve(llm, [random_tokens(llm, args.turn_tokens, seed=99)], 2)
        prompt: list[int] = []
        for turn in range(args.turns):
            prompt = prompt + random_tokens(llm, args.turn_tokens, seed=100 + turn)
            before = llm.engine.stats()["prefill_tokens"]
            (request,) = serve(llm, [prompt], args.turn_tokens)
            rows.append({
                "turn": turn,
                "prompt": len(prompt),
                "computed": int(llm.engine.stats()["prefill_tokens"] - before),
                "ttft_ms": 1e3 * (request.ttft or 0.0),
            })  # fmt: skip
            prompt += request.generated_tokens
    return rows


def measure_unique(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The row of the load "unique"."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    times: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        llms = {
            caches: stack.enter_context(
                open_llm(model, args, max_requests=args.batch, enable_prefix_caching=caches)
            )
            for caches in rates
        }
        for number in range(args.repeats + WARM_UP):
            for caches, llm in llms.items():
                prompts = [
                    random_tokens(llm, args.prefix_tokens, seed=number * args.batch + n)
                    for n in range(args.batch)
                ]
                begin = time.perf_counter()
                done = serve(llm, prompts, args.output_tokens)
                took = time.perf_counter() - begin
                if number >= WARM_UP:
                    rates[caches].append(args.batch * args.output_tokens / took)
                    times[caches].append(statistics.median(r.ttft or 0.0 for r in done))
    rate = {caches: statistics.median(values) for caches, values in rates.items()}
    ttft = {caches: 1e3 * statistics.median(values) for caches, values in times.items()}
    return [{
        "tokens_per_second": rate[False],
        "with_cache": rate[True],
        "ratio": rate[True] / rate[False],
        "ttft_ms": ttft[False],
        "ttft_with_cache_ms": ttft[True],
        "ttft_ratio": ttft[True] / ttft[False],
    }]  # fmt: skip


def measure_snapshots(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The row of the load "snapshots"."""
    found: dict[int, list[float]] = {0: [], args.interval: []}
    count = args.prefix_tokens // args.interval + 1
    with ExitStack() as stack:
        llms = {
            interval: stack.enter_context(
                open_llm(
                    model, args, enable_prefix_caching=True, num_state_snapshots=count,
                    prefix_caching_mamba_interval=interval,
                )
            )
            for interval in found
        }  # fmt: skip
        for number in range(args.repeats + WARM_UP):
            for interval, llm in llms.items():
                prompt = random_tokens(llm, args.prefix_tokens, seed=number)
                took = ttft_ms(llm, prompt)
                if number >= WARM_UP:
                    found[interval].append(took)
        kept = llms[args.interval].engine.stats()["prefix_cache_snapshots"]
    plain, kept_ms = (statistics.median(found[interval]) for interval in found)
    return [{"ttft_ms": plain, "with_snapshots_ms": kept_ms, "ratio": kept_ms / plain,
             "snapshots": kept}]  # fmt: skip


LOADS: dict[str, Callable[[str, argparse.Namespace], list[dict[str, Any]]]] = {
    "tail": measure_tail,
    "turns": measure_turns,
    "unique": measure_unique,
    "snapshots": measure_snapshots,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of each load and, with --json, write them."""
    parser = load_parser("prefix-cache", __doc__, several=True)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["tail", "turns", "unique"])
    parser.add_argument("--prefix-tokens", type=int, default=8192, help="a multiple of 128")
    parser.add_argument("--tails", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=500)
    parser.add_argument("--interval", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16, help="prompts of unique, at once")
    parser.add_argument("--output-tokens", type=int, default=64, help="of unique")
    parser.add_argument("--max-tokens", type=int, default=8192, help="budget of a step")
    parser.add_argument("--repeats", type=int, default=5)
    add_model_options(parser)
    args = parser.parse_args(arguments)
    if args.prefix_tokens < 128 or args.prefix_tokens % 128:
        parser.error(f"--prefix-tokens {args.prefix_tokens} must be a multiple of 128.")
    figures = []
    for model in routed(args.models, args.routing):
        for load in args.loads:
            print(f"{model}: {load}")
            for row in LOADS[load](model, args):
                figures.append({"model": model, "load": load, **row})
                shown = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}"
                         for k, v in row.items())  # fmt: skip
                print("  " + "  ".join(shown), flush=True)
    if args.json:
        write_record(args.json, "prefix_cache", vars(args), figures)
