"""Serve very many requests and check that nothing is left behind: memory, slots, blocks, futures.

Requests have random lengths, priorities and stop tokens, some are aborted at random, some are
streamed, and the KV pool is tight, so that requests pause and are evicted. With --simulated there
is no model, and every request's tokens are checked against what they must be; with --model a real
one runs, and its answers are checked for their lengths and ends.
"""

import argparse
import contextlib
import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_async import LLM, DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.requests.inference_request import DynamicInferenceRequest

STOP_TOKENS = 8
"""Tokens 0 .. 7 end the requests that have stop tokens."""
LONGEST_CPU_US = 20_000
"""Steps whose CPU time is more are counted as this."""
CHUNK = 4096
"""Requests whose parameters are drawn at once."""


class HashTokens:
    """Tokens that follow from request id and position, so that every answer is known."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """Tokens of a step: each follows from its row's request and KV length."""
        tokens = self.tokens(context.slots.request_id[plan.slots], plan.kv_at_most)
        return tokens, np.ones(len(tokens), dtype=np.int32)

    def tokens(self, request_ids: Any, positions: Any) -> NDArray[np.int32]:
        """Tokens at `positions` of requests, int32."""
        mixed = np.asarray(request_ids, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.asarray(positions, np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0x94D049BB133111EB)
        return ((mixed >> np.uint64(33)) % np.uint64(self._vocab_size)).astype(np.int32)


class Answers(Protocol):
    """Checks finished requests."""

    def check(self, request: DynamicInferenceRequest) -> None:
        """Raise AssertionError if a request's answer is wrong."""
        ...


class KnownAnswers:
    """Checks every token."""

    def __init__(self, tokens: HashTokens) -> None:
        self._tokens = tokens

    def check(self, request: DynamicInferenceRequest) -> None:
        """Compare an answer with what it must be; an aborted one may be shorter."""
        check_end(request)
        positions = len(request.prompt_tokens) + np.arange(len(request.generated_tokens))
        expected = self._tokens.tokens(request.request_id, positions)
        assert request.generated_tokens == list(expected), f"{request}: wrong tokens"


class PlausibleAnswers:
    """Checks lengths and ends."""

    def check(self, request: DynamicInferenceRequest) -> None:
        """Check that an answer ends where it should."""
        check_end(request)


def check_end(request: DynamicInferenceRequest) -> None:
    """An answer ends at its limit or at its first stop token, or was aborted before that."""
    tokens, params = request.generated_tokens, request.sampling_params
    limit, stops = params.num_tokens_to_generate, set(params.stop_token_ids or ())
    reason = request.finish_reason
    assert reason in ("length", "stop_token", "aborted"), f"{request}: {reason}, {request.error}"
    assert limit is not None  # `Requests` sets it
    assert len(tokens) <= limit, f"{request}: beyond its limit of {limit}"
    assert stops.isdisjoint(tokens[:-1]), f"{request}: went on after a stop token"
    if reason != "aborted":
        stopped = tokens[-1] in stops
        assert stopped == (reason == "stop_token"), f"{request}: ended by {reason}"
        assert stopped or len(tokens) == limit, f"{request}: ended before its limit"


class Requests:
    """The requests of a soak, drawn from a seed as they are needed."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self._args = args
        self._random = np.random.default_rng(args.seed)
        self._pool = self._random.integers(vocab_size, size=2 * CHUNK, dtype=np.int32)
        self._rows: list[list[int]] = []
        self.added = 0

    def add_next(self, engine: DynamicInferenceEngine) -> Any:
        """Queue the next request; returns its future."""
        if not self._rows:
            self._draw()
        prompt, output, start, priority, stops, stream = self._rows.pop()
        params = SamplingParams(
            temperature=0.0,
            num_tokens_to_generate=output,
            termination_id=-1,
            stop_token_ids=list(range(STOP_TOKENS)) if stops == 0 else None,
        )
        number = self.added
        self.added += 1
        tokens = self._pool[start : start + prompt]
        future = engine.add_request(number, tokens, params, priority=int(priority == 0))
        return future, engine.stream(number) if stream == 0 else None

    def _draw(self) -> None:
        args = self._args
        highs = (args.max_prompt_tokens, args.max_output_tokens, CHUNK, 50, 3, 100)
        columns = [self._random.integers(high, size=CHUNK) for high in highs]
        columns[0] += 1
        columns[1] += 1
        self._rows = np.stack(columns, axis=1).tolist()


class Soak:
    """One run on an idle engine; `answers` checks what ends."""

    def __init__(
        self, engine: DynamicInferenceEngine, answers: Answers, args: argparse.Namespace
    ) -> None:
        self._engine, self._answers, self._args = engine, answers, args
        self._requests = Requests(args, engine.controller.vocab_size)
        self._random = np.random.default_rng((args.seed, 1))
        self._cpu_us = np.zeros(LONGEST_CPU_US + 1, dtype=np.int64)
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reasons: Counter[str] = Counter()
        self._tokens = 0
        self._most_unfinished = 0

    def run(self) -> dict[str, Any]:
        """Serve all; figures of the run. An AssertionError says what is wrong or left behind."""
        args, process = self._args, psutil.Process()
        rss_start, rss_warm, start = process.memory_info().rss, 0, time.perf_counter()
        with tqdm(total=args.requests, unit="request", disable=args.no_progress or None) as bar:
            while self._requests.added < args.requests or self._engine.has_unfinished_requests():
                self._add()
                self._step()
                ended = self._reasons.total()
                bar.update(ended - bar.n)
                if not rss_warm and ended >= args.warmup_share * args.requests:
                    gc.collect()
                    rss_warm = process.memory_info().rss
        seconds = time.perf_counter() - start
        self._check_nothing_is_left()
        growth = process.memory_info().rss - rss_warm
        figures = self._figures(seconds)
        for name, size in (("start", rss_start), ("warm", rss_warm), ("end", rss_warm + growth)):
            figures[f"rss_{name}_mb"] = size / 2**20
        return figures

    def _add(self) -> None:
        engine, args = self._engine, self._args
        while self._requests.added < args.requests and len(engine.requests) < args.backlog:
            future, stream = self._requests.add_next(engine)
            if stream is not None:
                self._alive.update((future, stream))

    def _step(self) -> None:
        engine, counters = self._engine, self._engine.statistics
        before = counters.prepare_ns + counters.launch_ns + counters.resolve_ns
        report = engine.step_modern()
        spent = counters.prepare_ns + counters.launch_ns + counters.resolve_ns - before
        self._cpu_us[min(spent // 1000, LONGEST_CPU_US)] += 1
        self._most_unfinished = max(self._most_unfinished, len(engine.requests))
        for request in report["finished_request_records"]:
            self._answers.check(request)
            self._reasons[request.finish_reason] += 1
            self._tokens += len(request.generated_tokens)
        if self._random.random() < self._args.abort_share:
            self._abort()

    def _abort(self) -> None:
        oldest = self._requests.added - self._args.backlog
        number = int(self._random.integers(max(oldest, 0), self._requests.added))
        with contextlib.suppress(KeyError):  # it has ended already
            self._engine.abort_request(number)

    def _check_nothing_is_left(self) -> None:
        engine, context = self._engine, self._engine.context
        context.check_integrity()
        assert not engine.in_flight, "steps are left in flight"
        assert context.slots.num_free == context.max_requests, "slots are left"
        assert context.blocks.allocatable == context.blocks.total, "KV blocks are left"
        assert len(context.waiting) == 0, "waiting requests are left"
        assert len(engine.requests) == 0, "unfinished requests are left"
        gc.collect()
        assert not len(self._alive), f"{len(self._alive)} futures and streams are left"
        stats, reasons = engine.stats(), self._reasons
        ended = (stats["finished_requests"], stats["failed_requests"])
        expected = (reasons.total() - reasons["aborted"], reasons["aborted"])
        assert ended == expected, f"finished and failed are {ended}, seen were {expected}"
        assert reasons.total() == self._args.requests, f"{reasons.total()} requests ended"
        booked = stats["generated_tokens"]
        assert booked == self._tokens, f"{booked} tokens were booked, {self._tokens} came out"
        assert stats["failed_steps"] == 0, "steps failed"

    def _figures(self, seconds: float) -> dict[str, Any]:
        stats, total = self._engine.stats(), np.cumsum(self._cpu_us)
        p50, p99 = (int(np.searchsorted(total, share * total[-1])) for share in (0.5, 0.99))
        return {
            "requests": self._args.requests,
            "seconds": seconds,
            "requests_per_second": self._args.requests / seconds,
            "tokens": self._tokens,
            "mean_rows": stats["rows"] / max(stats["steps"], 1),
            **{key: stats[key] for key in ("steps", "zombie_rows", "pauses", "evictions")},
            **{f"ended_by_{reason}": count for reason, count in sorted(self._reasons.items())},
            "most_unfinished": self._most_unfinished,
            "cpu_us_p50": p50,
            "cpu_us_p99": p99,
        }


def run_soak(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests of the command line; the figures."""
    settings: dict[str, Any] = {
        "lookahead": args.lookahead,
        "max_requests": args.max_requests,
        "max_tokens": args.max_tokens,
        "num_kv_blocks": args.num_kv_blocks,
        "block_size_tokens": args.block_size_tokens,
        "paused_buffer_size_gb": args.paused_buffer_size_gb,
        "max_sequence_length": args.max_prompt_tokens + args.max_output_tokens,
    }
    if args.simulated:
        shape = ModelShape.of_architecture(DUMMY_SHAPES["tiny"], "float32")
        tokens = HashTokens(shape.vocab_size)
        engine = ModelLessEngine(shape, InferenceConfig(**settings), tokens)
        figures = Soak(engine, KnownAnswers(tokens), args).run()
        engine.close()
        return figures
    with LLM(args.model, device=args.device, **settings) as llm:
        return Soak(llm.engine, PlausibleAnswers(), args).run()


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulated", action="store_true", help="without a model")
    what.add_argument("--model", help="anything that LLM loads")
    parser.add_argument("--device", default=None, help="of --model (default: the best)")
    parser.add_argument("--requests", type=int, default=20_000, help="default 20000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backlog", type=int, default=96, help="unfinished at once (default 96)")
    parser.add_argument("--max-prompt-tokens", type=int, default=32, help="default 32")
    parser.add_argument("--max-output-tokens", type=int, default=32, help="default 32")
    parser.add_argument(
        "--abort-share", type=float, default=0.1, help="steps with an abort (default 0.1)"
    )
    parser.add_argument("--lookahead", type=int, default=1, help="default 1")
    parser.add_argument("--max-requests", type=int, default=64, help="default 64")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a step (default 256)")
    parser.add_argument("--num-kv-blocks", type=int, default=600, help="default 600: tight")
    parser.add_argument(
        "--paused-buffer-size-gb",
        type=float,
        default=2e-5,
        help="most KV memory of paused requests; more is evicted (default 2e-5, 20 KiB)",
    )
    parser.add_argument("--block-size-tokens", type=int, default=2, help="default 2")
    parser.add_argument(
        "--warmup-share", type=float, default=0.5, help="of the requests (default 0.5)"
    )
    parser.add_argument(
        "--max-growth-mb", type=float, default=16.0, help="of memory once warm (default 16)"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bar")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if memory grew by more than it may."""
    args = build_parser().parse_args(arguments)
    figures = run_soak(args)
    for name, value in figures.items():
        print(f"{name:<22}{value:>14.1f}" if isinstance(value, float) else f"{name:<22}{value:>14}")
    if args.json:
        device = "cpu" if args.simulated else args.device
        write_record(args.json, "soak", {**vars(args), "device": device}, [figures])
    growth = figures["rss_end_mb"] - figures["rss_warm_mb"]
    if growth > args.max_growth_mb:
        print(
            f"memory grew by {growth:.1f} MB since the warm-up, more than the "
            f"{args.max_growth_mb:g} MB of --max-growth-mb: something is kept.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
