"""Time steady decode as a program with many readers sees it: the engine alone (`step_modern`), its
loop on an event loop (`run_engine`), and the same with a stream read for each request.

Reports for a step: the median time over windows of steps, and its ratio to the engine alone; the
CPU time of the engine's own stages; the CPU time of the whole thread; the chunks that readers got,
and the tokens in a chunk. The thread's time includes asking whether samples are there, so it is
about the step time where the device is slower than the CPU. Models without a tokenizer get a
made-up one, so that text is made too.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders
from tokenizers.models import BPE

from engine_loads.options import (
    ONE_SHAPE,
    add_model_options,
    cells,
    load_parser,
    open_model,
    routed,
)
from megatron_async import LLM, DynamicInferenceEngine, SamplingParams
from megatron_async.engine.listener import EngineListener
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.workloads import start_steady_decode, steady_decode_tokens
from megatron_async.requests.streaming import RequestStream
from megatron_async.step.text_generation_controller import LaunchedStep
from megatron_async.text.tokenizer import Tokenizer

WINDOWS = 5
WARM_UP = 20
"""Steps before the windows, in which readers catch up with what was generated before them."""
SLACK = 200
"""Steps that may run between the end of the last window and the engine's halt."""
MAX_TOKENS = 8192
MODES = ("step_modern", "run_engine", "streams")
COLUMNS = (
    "step_ms",
    "over_engine",
    "engine_cpu_us",
    "thread_cpu_us",
    "chunks_per_step",
    "tokens_per_chunk",
)


class StepClock(EngineListener):
    """Notes when steps are booked, after the warm-up, with the engine's own CPU time, and wakes the
    waiters for the last of them."""

    def __init__(self, engine: DynamicInferenceEngine, steps: int) -> None:
        self._engine = engine
        self._steps = steps
        self._count = 0
        self.ends: list[float] = []
        self.cpu: list[tuple[float, float]] = []
        """Seconds so far of the engine's stages and of the thread, at the first and last end."""
        self.is_over = asyncio.Event()

    def resolved(self, step: LaunchedStep) -> None:
        """Note the time, when the warm-up is over."""
        self._count += 1
        if WARM_UP <= self._count <= WARM_UP + self._steps:
            self.ends.append(time.perf_counter())
            if len(self.ends) in (1, self._steps + 1):
                counters = self._engine.statistics
                stages = counters.prepare_ns + counters.launch_ns + counters.resolve_ns
                self.cpu.append((stages / 1e9, time.thread_time()))
            if len(self.ends) == self._steps + 1:
                self.is_over.set()

    def figures(self) -> dict[str, float]:
        """Milliseconds and microseconds a step."""
        steps = self._steps // WINDOWS
        means = [
            (self.ends[first + steps] - self.ends[first]) / steps
            for first in range(0, self._steps, steps)
        ]
        engine, thread = (
            1e6 * (end - start) / self._steps for start, end in zip(*self.cpu, strict=True)
        )
        step_ms = 1e3 * statistics.median(means)
        return {"step_ms": step_ms, "engine_cpu_us": engine, "thread_cpu_us": thread}


class Reader:
    """Counts what one stream brings.

    Attributes:
        chunks, tokens: so far.
    """

    def __init__(self) -> None:
        self.chunks = self.tokens = 0

    async def read(self, stream: RequestStream) -> None:
        """Read to the end."""
        async for chunk in stream:
            self.chunks += 1
            self.tokens += len(chunk.tokens)


async def measure(
    engine: DynamicInferenceEngine, mode: str, batch: int, args: argparse.Namespace
) -> dict[str, float]:
    """Figures of one way to step an idle engine, which is idle again afterwards."""
    steps = WINDOWS * args.steps
    sampling = SamplingParams(temperature=args.temperature)
    start_steady_decode(engine, batch, args.prompt_tokens, steps + SLACK, sampling=sampling)
    clock, reader = StepClock(engine, steps), Reader()
    engine.listeners.append(clock)
    if mode == "step_modern":
        while not clock.is_over.is_set():
            engine.step_modern()
    else:
        streams = [engine.stream(number) for number in range(batch)] if mode == "streams" else []
        tasks = [asyncio.create_task(reader.read(stream)) for stream in streams]
        tasks.append(asyncio.create_task(engine.run_engine()))
        over = asyncio.create_task(clock.is_over.wait())
        done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:  # with the error of the engine's task, if it has one
            task.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    engine.listeners.remove(clock)
    for number in range(batch):
        engine.abort_request(number)
    while engine.has_unfinished_requests():
        engine.step_modern()
    chunks = {}
    if reader.chunks:
        # The first chunk of each brings what was generated before it was read.
        chunks = {
            "chunks_per_step": reader.chunks / (steps + WARM_UP),
            "tokens_per_chunk": reader.tokens / reader.chunks,
        }
    return clock.figures() | chunks


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer in which each token is a short word."""
    letters = "etaoinshrdlucmfw"
    words = itertools.chain.from_iterable(
        itertools.product(letters, repeat=length) for length in itertools.count(1)
    )
    vocabulary = {
        "Ġ" + "".join(word): number
        for number, word in enumerate(itertools.islice(words, vocab_size))
    }
    backend = BackendTokenizer(BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, (), None, "made up")


def open_engine(model: str, batch: int, lookahead: int, args: argparse.Namespace) -> LLM:
    """A model with room for `batch` requests in steady decode."""
    steps, max_tokens = WINDOWS * args.steps + SLACK, max(MAX_TOKENS, batch)
    tokens = steady_decode_tokens(batch, args.prompt_tokens, max_tokens, steps)
    length = args.prompt_tokens + tokens
    return open_model(model, args, batch, length, max_tokens, lookahead=lookahead, **ONE_SHAPE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = load_parser("streams", __doc__, several=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=100, help=f"steps in each of {WINDOWS} windows (default 100)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    add_model_options(parser)
    args = parser.parse_args(arguments)
    args.models = routed(args.models, args.routing)
    heads = "".join(f"{column:>18}" for column in COLUMNS)
    print(f"{'model':<22}{'batch':>6}{'lookahead':>10}  {'mode':<12}{heads}")
    figures = []
    for model, batch, lookahead in itertools.product(args.models, args.batch_sizes, args.lookahead):
        with open_engine(model, batch, lookahead, args) as llm:
            engine, alone = llm.engine, 0.0
            if engine.controller.tokenizer is None:
                engine.controller.tokenizer = made_up_tokenizer(engine.controller.vocab_size)
            for mode in MODES:
                result = asyncio.run(measure(engine, mode, batch, args))
                alone = alone or result["step_ms"]
                result["over_engine"] = result["step_ms"] / alone
                setting = {"model": model, "batch": batch, "lookahead": lookahead, "mode": mode}
                figures.append(setting | result)
                line = f"{model:<22}{batch:>6}{lookahead:>10}  {mode:<12}"
                print(line + cells(result, COLUMNS, 18), flush=True)
                if args.json:  # after each: what is measured is kept if the next one fails
                    write_record(args.json, "streams", vars(args), figures)
