"""Measure the engine's own CPU time a step (prepare, launch, resolve) without a model.

The engine runs as it is, on a CPU device, with a model that does no arithmetic: its forward returns
zeros. So what is measured is scheduling and bookkeeping alone, on whatever CPU this is. With
--stop-words every request has one that never comes, in random text of letters or of the first
tokens of a real tokenizer.
"""

import argparse
import statistics as stats
from collections.abc import Sequence
from typing import Any

import torch
from engine_loads.eventful_churn import LetterTokenizer

from megatron_async import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig
from megatron_async.checkpoints.registry import open_model
from megatron_async.lab.benchmark_record import write_record
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import transformer_config
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.step.text_generation_controller import TextGenerationController

NEVER = "q" * 24
"""A stop word that random text does not contain, and now and then seems to end with."""


class NoModel:
    """Stands for the wrapped model: the cheapest logits there are."""

    vocab_size = 512
    shard = None

    def __init__(self, context: DynamicInferenceContext, columns: int = 2) -> None:
        self.inference_context = context
        self._logits = torch.zeros(context.max_requests, columns)

    def forward(self, view: object) -> torch.Tensor:
        """Zeros, `[rows, 2]`."""
        return self._logits[: self.inference_context.gpu_view.dims.rows]


def make_tokenizer(name: str | None) -> Any:
    """The tokenizer in whose texts stop words are looked for."""
    if name == "smollm2":
        return open_model("smollm2").tokenizer
    return None if name is None else LetterTokenizer()


def measure(
    rows: int,
    lookahead: int,
    steps: int,
    warmup: int,
    stop_words: str | None = None,
    block_size: int = 16,
    prefix_caching: bool = False,
    shape: str = "tiny",
) -> dict[str, float]:
    """Median CPU microseconds a step at `rows` decoding requests."""
    config = InferenceConfig(
        device="cpu",
        lookahead=lookahead,
        max_requests=max(rows, 1),
        max_tokens=max(4096, rows * 16),
        block_size_tokens=block_size,
        max_sequence_length=16 + steps + warmup + 64,
        num_kv_blocks=rows * ((16 + steps + warmup + 64) // block_size + 1),
        enable_prefix_caching=prefix_caching,
    )
    model_config = transformer_config(DUMMY_SHAPES[shape], torch.float32)
    context = DynamicInferenceContext(model_config, config)
    model = NoModel(context, 2 if stop_words is None else NoModel.vocab_size)
    controller = TextGenerationController(model, make_tokenizer(stop_words))  # type: ignore[arg-type]
    engine = DynamicInferenceEngine(controller, context)
    params = SamplingParams(temperature=0.0, termination_id=-1)
    if stop_words is not None:
        params = SamplingParams(temperature=1.0, termination_id=-1, stop_words=[NEVER])
    for request in range(rows):
        engine.add_request(request, [1 + request % 500] * (1 + request % 16), params)
    for _ in range(warmup):
        engine.step_modern()
    samples: dict[str, list[float]] = {"prepare": [], "launch": [], "resolve": [], "total": []}
    counters = engine.statistics
    for _ in range(steps):
        before = (counters.prepare_ns, counters.launch_ns, counters.resolve_ns)
        engine.step_modern()
        after = (counters.prepare_ns, counters.launch_ns, counters.resolve_ns)
        parts = [(b - a) / 1e3 for a, b in zip(before, after, strict=True)]
        for name, value in zip(samples, [*parts, sum(parts)], strict=True):
            samples[name].append(value)
    engine.close()
    result = {name: stats.median(values) for name, values in samples.items()}
    result["p99"] = sorted(samples["total"])[int(0.99 * steps)]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=1000, help="measured steps (default 1000)")
    parser.add_argument("--stop-words", choices=["letters", "smollm2"], help="tokenizer of them")
    parser.add_argument("--block-size", type=int, default=16, help="tokens (default 16)")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument(
        "--shape",
        default="tiny",
        choices=["tiny", "tiny-hybrid"],
        help="layers that keep something of a request: attention, or recurrent ones too",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    print(f"CPU microseconds of the engine's thread a step, median of {args.steps}")
    header = ("rows", "lookahead", "prepare", "launch", "resolve", "total", "p99 total")
    print("".join(f"{name:>11}" for name in header))
    figures = []
    for rows in args.rows:
        for lookahead in args.lookahead:
            asked = (args.stop_words, args.block_size, args.prefix_caching, args.shape)
            result = measure(rows, lookahead, args.steps, 20, *asked)
            figures.append({"rows": rows, "lookahead": lookahead, **result})
            values = (result[k] for k in ("prepare", "launch", "resolve", "total", "p99"))
            print(f"{rows:>11}{lookahead:>11}" + "".join(f"{v:>11.1f}" for v in values))
    if args.json:
        write_record(args.json, "bookkeeping", {"device": "cpu", **vars(args)}, figures)


if __name__ == "__main__":
    main()
