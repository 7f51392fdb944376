"""Does the engine on this device say what a reference says, token for token?

Greedy tokens of the engine under test, at every lookahead and batch size asked for, are compared
with a reference: this engine, serial (lookahead 0), in float32 on --reference-device, or
`transformers` in float32 (--reference transformers, which needs the dev extra). Both compute with
the weights as --dtype holds them, so what may differ is the arithmetic alone.

At the first token where a request differs, the reference's logits are computed again from the
tokens before it, which both sides share. The divergence is a *near tie* if the reference prefers
its own token to the engine's by less than

    tolerance = u * sqrt(2 * layers) * (largest |logit|)

where u is the unit roundoff of the dtype (2**-24 for float32, 2**-8 for bfloat16): each of a
layer's 2 sublayers adds an independent rounding error of that relative size. (SmolLM2 in bfloat16:
differences between two likely tokens are off by 0.1 to 0.4, the tolerance is 0.6 to 1.2.) Anything
else is a FAIL, and the exit code is 1. With --exact near ties fail too.

    python scripts/check_parity.py --model smollm2 --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_async import (
    LLM,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.dtypes import DTYPES, parse_dtype

TEXTS = (
    "Hello",
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Water boils when it is heated because its molecules move faster and faster, until",
    "List three things that float: ",
    "A",
)
"""Prompts of several lengths, for models with a tokenizer."""


class Reference(Protocol):
    """What the engine under test is measured against."""

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """`tokens` greedy tokens for each prompt."""
        ...

    def last_logits(self, tokens: list[int]) -> Tensor:
        """Logits after `tokens`: float32 `[vocabulary]` on the CPU."""
        ...


@dataclass
class Divergence:
    """The first token at which a request and its reference part."""

    request: int
    position: int
    """Generated tokens before it."""
    reference_token: int
    engine_token: int
    top_logits: tuple[float, float]
    """The reference's two largest."""
    gap: float
    """How much the reference prefers its token to the engine's, logits."""
    tolerance: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= self.tolerance


@dataclass
class Outcome:
    """One run: a lookahead at a batch size."""

    lookahead: int
    batch_size: int
    identical: int
    overlap_ratio: float
    pauses: int
    evictions: int
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def near_ties(self) -> int:
        """Requests that parted from the reference where it was undecided."""
        return sum(divergence.is_near_tie for divergence in self.divergences)

    @property
    def failures(self) -> int:
        """Requests that parted from the reference without such an excuse."""
        return len(self.divergences) - self.near_ties


class LogitsKeeper(GPTInferenceWrapper):
    """Keeps the logits of the step that ran last."""

    logits: Tensor

    def forward(self, view: Any) -> Tensor:
        """See `GPTInferenceWrapper.forward`."""
        self.logits = super().forward(view)
        return self.logits


class EngineReference:
    """This engine, serial, in float32."""

    def __init__(
        self, model_name: str, device: str, weight_dtype: torch.dtype, config: InferenceConfig
    ) -> None:
        model = load_model(model_name, torch.float32, torch.device(device)).model
        round_weights(model, weight_dtype)
        context = DynamicInferenceContext(model.config, config)
        self._wrapper = LogitsKeeper(model, context)
        self._engine = DynamicInferenceEngine(TextGenerationController(self._wrapper), context)

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """See `Reference.greedy`."""
        return generate(self._engine, prompts, tokens)

    def last_logits(self, tokens: list[int]) -> Tensor:
        """See `Reference.last_logits`: the prefill of `tokens` as a prompt."""
        generate(self._engine, [tokens], 1)
        return self._wrapper.logits[-1].to("cpu", torch.float32)


class TransformersReference:
    """`transformers`, in float32: a plain loop with a KV cache."""

    def __init__(self, model_name: str, device: str, weight_dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        from megatron_async.checkpoints.convert import convert

        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "model"
            convert(model_name, folder, to="huggingface", progress=False)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model: Any = model.to(device).eval()
        self._device = device
        round_weights(self._model, weight_dtype)

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """See `Reference.greedy`."""
        outputs = []
        for prompt in prompts:
            ids, cache, output = torch.tensor([prompt], device=self._device), None, []
            for _ in range(tokens):
                result = self._model(ids, past_key_values=cache, use_cache=True)
                cache, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
                output.append(int(ids))
            outputs.append(output)
        return outputs

    @torch.inference_mode()
    def last_logits(self, tokens: list[int]) -> Tensor:
        """See `Reference.last_logits`."""
        ids = torch.tensor([tokens], device=self._device)
        return self._model(ids).logits[0, -1].to("cpu", torch.float32)


def round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give float32 weights the values that they have in `dtype`."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.to(dtype))


def generate(
    engine: DynamicInferenceEngine, prompts: list[list[int]], tokens: int
) -> list[list[int]]:
    """`tokens` greedy tokens for each prompt; a failed request raises its error."""
    greedy = SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, termination_id=-1)
    requests = engine.generate(prompts, greedy)
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.generated_tokens for request in requests]


def make_prompts(model_name: str, count: int) -> list[list[int]]:
    """Token ids of `count` prompts of different lengths: text where the model has a tokenizer,
    random ids where it has none."""
    source = open_model(model_name)
    tokenizer = source.tokenizer
    if tokenizer is not None:
        more = [f"{number} plus {number * 7} is" for number in range(count - len(TEXTS))]
        return [list(tokenizer.tokenize(text)) for text in [*TEXTS, *more][:count]]
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + 37 * number % 96 for number in range(count)]
    vocabulary = source.architecture.vocab_size
    return [
        [int(token) for token in torch.randint(vocabulary, (length,), generator=generator)]
        for length in lengths
    ]


def tolerance(logits: Tensor, dtype: torch.dtype, num_layers: int) -> float:
    """Largest gap between two logits that rounding in `dtype` may turn around (see the module's
    text)."""
    roundoff = torch.finfo(dtype).eps / 2
    return roundoff * math.sqrt(2 * num_layers) * float(logits.abs().max())


def find_divergences(
    prompts: list[list[int]],
    expected: list[list[int]],
    found: list[list[int]],
    reference: Reference,
    dtype: torch.dtype,
    num_layers: int,
) -> list[Divergence]:
    """The first difference of every request that has one, judged by the reference's logits."""
    divergences = []
    for request, (prompt, want, have) in enumerate(zip(prompts, expected, found, strict=True)):
        if want == have:
            continue
        position = next(i for i in range(len(want)) if want[i] != have[i])
        logits = reference.last_logits(prompt + want[:position])
        first, second = logits.topk(2).values
        divergences.append(
            Divergence(
                request,
                position,
                want[position],
                have[position],
                (float(first), float(second)),
                float(logits[want[position]] - logits[have[position]]),
                tolerance(logits, dtype, num_layers),
            )
        )
    return divergences


def check(
    engine: DynamicInferenceEngine,
    reference: Reference,
    prompts: list[list[int]],
    expected: list[list[int]],
    lookahead: int,
    dtype: torch.dtype,
    num_layers: int,
) -> Outcome:
    """Run `prompts` together at a lookahead and compare."""
    # The engine is idle and its buffers are made for the largest lookahead asked for.
    engine.lookahead = lookahead
    engine.statistics = type(engine.statistics)()
    before = engine.stats()
    found = generate(engine, prompts, len(expected[0]))
    after = engine.stats()
    divergences = find_divergences(prompts, expected, found, reference, dtype, num_layers)
    return Outcome(
        lookahead=lookahead,
        batch_size=len(prompts),
        identical=len(prompts) - len(divergences),
        overlap_ratio=after["overlap_ratio"],
        pauses=int(after["pauses"] - before["pauses"]),
        evictions=int(after["evictions"] - before["evictions"]),
        divergences=divergences,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, every default filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="anything that LLM loads")
    parser.add_argument("--device", default="cpu", help="of the engine under test")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--transformer-impl", default="local", help="of the engine under test")
    parser.add_argument("--reference", choices=["engine", "transformers"], default="engine")
    parser.add_argument("--reference-device", default="cpu")
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens a request")
    parser.add_argument("--block-size-tokens", type=int, default=64)
    parser.add_argument(
        "--num-kv-blocks",
        type=int,
        help="pool of the engine under test; default: room for all, fewer make it pause and evict",
    )
    parser.add_argument("--exact", action="store_true", help="near ties fail too")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes there")
    args = parser.parse_args(arguments)
    if min(args.batch_sizes) < 1 or min(args.lookahead) < 0 or args.tokens < 1:
        parser.error("batch sizes and tokens start at 1, lookahead at 0")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; exit code 1 if anything failed."""
    args = parse_arguments(arguments)
    dtype = parse_dtype(args.dtype)
    prompts = make_prompts(args.model, max(args.batch_sizes))
    longest = max(map(len, prompts)) + args.tokens
    enough = len(prompts) * -(-longest // args.block_size_tokens)
    settings: dict[str, Any] = {
        "block_size_tokens": args.block_size_tokens,
        "max_sequence_length": longest,
        "max_requests": len(prompts),
        "max_tokens": max(2048, len(prompts)),
    }

    reference: Reference
    if args.reference == "transformers":
        reference = TransformersReference(args.model, args.reference_device, dtype)
    else:
        config = InferenceConfig(
            device=args.reference_device, lookahead=0, num_kv_blocks=enough, **settings
        )
        reference = EngineReference(args.model, args.reference_device, dtype, config)
    expected = reference.greedy(prompts, args.tokens)

    llm = LLM(
        args.model,
        device=args.device,
        dtype=dtype,
        transformer_impl=args.transformer_impl,
        lookahead=max(args.lookahead),
        num_kv_blocks=args.num_kv_blocks or enough,
        **settings,
    )
    num_layers = open_model(args.model).architecture.num_layers
    print(
        f"{args.model}, {args.dtype} on {args.device}; reference: {args.reference}, float32 on "
        f"{args.reference_device}; {args.tokens} tokens"
    )
    print("lookahead  batch  identical  near ties  FAIL  overlap  pauses  evictions")
    outcomes = []
    for lookahead in args.lookahead:
        for size in args.batch_sizes:
            outcome = check(
                llm.engine,
                reference,
                prompts[:size],
                expected[:size],
                lookahead,
                dtype,
                num_layers,
            )
            outcomes.append(outcome)
            print(
                f"{lookahead:9}{size:7}{outcome.identical:11}{outcome.near_ties:11}"
                f"{outcome.failures:6}{outcome.overlap_ratio:9.2f}{outcome.pauses:8}"
                f"{outcome.evictions:11}"
            )
    llm.close()
    print_divergences(outcomes)
    failed = sum(
        len(outcome.divergences) if args.exact else outcome.failures for outcome in outcomes
    )
    if args.json:
        report = {"settings": vars(args), "failed": failed, "outcomes": list(map(asdict, outcomes))}
        Path(args.json).write_text(json.dumps(report, indent=1))
    print("FAIL" if failed else "OK")
    return 1 if failed else 0


def print_divergences(outcomes: list[Outcome]) -> None:
    """One line for each first difference."""
    for outcome in outcomes:
        for d in outcome.divergences:
            top, second = d.top_logits
            print(
                f"lookahead {outcome.lookahead}, batch {outcome.batch_size}, request {d.request}, "
                f"token {d.position}: reference {d.reference_token}, engine {d.engine_token}; "
                f"top logits {top:.5f} and {second:.5f} ({top - second:.2g} apart), "
                f"gap to the engine's token {d.gap:.2g}, tolerance {d.tolerance:.2g}: "
                f"{'near tie' if d.is_near_tie else 'FAIL'}"
            )


if __name__ == "__main__":
    sys.exit(main())
