"""How far are a model's log probs in one setting from those in another: of given tokens, by the
engine.

Every setting scores the same tokens, of files (--text) or at random, in sequences of --length. The
first setting is the one that the others are compared with. A line for each of the others has the
mean and the largest distance of a token's log prob, K3 (the mean of exp(d) - d - 1, where d is the
other less the first, an estimate of the KL divergence), how many likeliest tokens are the same, and
the mean of the tokens' log probs less the first setting's (below 0: the text is less likely).

    python scripts/benchmarks/benchmark_quality.py smollm2 --text README.md docs/*.md --settings \
        dtype=float32,quantization=none dtype=bfloat16 emulate=fp8-channel+rows model=./other-folder

A setting is any of LLM's, and besides:
  model=M      another model with the same tokens, such as a converted folder
  emulate=KIND on a CPU, in float32: linear layers (not the output layer) and experts with weights
               in FP8, with a scale for each 128 x 128 ("fp8") or for each output ("fp8-channel").
               "+rows" after it: the input rows of linear layers are rounded too, with a scale for
               each 128 inputs, as GPUs with FP8 units do. Experts' rows are not rounded there.

Random weights have no large activations. --outliers N makes some for `dummy:SHAPE`: the factors of
every norm before a product are multiplied by 20 for the same N channels of the model, as large
models have a few channels far beyond the others (Dettmers et al. 2022).
"""

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.quantise import BLOCKS, QUANTIZATIONS, Quantiser
from megatron_async.errors import ConfigurationError
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.divergence import LogProbDistance
from megatron_async.models.linear import weights_on_cpu
from megatron_async.models.norm import fold_norms
from megatron_async.models.pipeline import OUTPUT
from megatron_async.ops.linear.products import product
from megatron_async.ops.linear.quantised_weight import BLOCK, Form, QuantisedWeight
from megatron_async.ops.linear.weight_format import FLOAT32

FACTOR = 20.0
"""Of the channels of `--outliers`."""
PLAIN = "dtype=float32,quantization=none"
ROWS = "+rows"
EXPERTS = ".experts.linear_fc"
NORMS = ("layernorm.weight", "decoder.final_norm.weight", ".norm.weight", "layer_norm_weight")
"""Ends of names of norms over the model's channels; norms of heads have other sizes."""
LINE = (
    "{setting:34} mean {mean:.4f}, largest {largest:.3f}, K3 {k3:.2e}; likeliest {likeliest:.4f}; "
    "log probs {shift:+.4f}"
)


class _Emulated:
    """A weight whose products are those of a quantised one (`KeptWeight`)."""

    format, looped = FLOAT32, None

    def __init__(self, weight: QuantisedWeight) -> None:
        self._weight, self.nbytes = weight, weight.nbytes

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product.reference(x, self._weight, bias)


def emulate(model: nn.Module, kind: str) -> None:
    """Let a float32 model on a CPU multiply by FP8 weights."""
    scales, rounds_rows = kind.removesuffix(ROWS), kind.endswith(ROWS)
    if scales not in QUANTIZATIONS:
        raise ConfigurationError(f"emulate={kind!r} is none: {', '.join(QUANTIZATIONS)}, {ROWS}")
    rows, inputs = (BLOCK, BLOCK) if scales == BLOCKS else (1, 0)
    form = Form("FP8", rows, inputs, rounds_rows=rounds_rows)

    def quantised(weight: Tensor) -> QuantisedWeight:
        if scales == BLOCKS and any(size % BLOCK for size in weight.shape):
            raise ConfigurationError(
                f"emulate={kind!r}: {BLOCK} does not divide a weight {list(weight.shape)}"
            )
        found = Quantiser(scales, frozenset(["w"]), ()).tensors("w", weight)
        codes, factors = found.values()
        return QuantisedWeight(codes, factors, form, torch.float32)

    layers = {id(module): weight for module, weight in weights_on_cpu(model)}
    if not layers:
        raise ConfigurationError(f"emulate={kind!r} is for float32 on a CPU")
    with torch.no_grad():
        for name, module in model.named_modules():
            if id(module) in layers and name != OUTPUT.removesuffix(".weight"):
                module.packed_weight = _Emulated(quantised(layers[id(module)]))
        for name, parameter in model.named_parameters():
            if EXPERTS in name:
                for expert in parameter:
                    expert.copy_(quantised(expert).values())


def plant_outliers(model: Any, count: int) -> None:
    """Multiply the norms' factors of `count` channels, the same everywhere."""
    hidden, zero = model.config.hidden_size, int(model.config.layernorm_zero_centered_gamma)
    channels = np.random.default_rng(0).choice(hidden, size=count, replace=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(NORMS) and parameter.shape == (hidden,):
                places = torch.as_tensor(channels, device=parameter.device)
                parameter[places] = (parameter[places] + zero) * FACTOR - zero
    fold_norms(model)


def scores(
    setting: str, sequences: list[list[int]], arguments: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray]:
    """Log probs and likeliest tokens of all places, `[tokens]` each, by an engine of its own."""
    options = parse_setting(setting)
    model, kind = options.pop("model", arguments.model), options.pop("emulate", None)
    if kind is not None:
        options.setdefault("quantization", "none")
    sizes = {"max_sequence_length": arguments.length + 1, "max_requests": 8, "num_cuda_graphs": 0}
    with LLM(model, **{"device": arguments.device, **sizes, **options}) as llm:
        built: Any = llm.engine.controller.inference_wrapped_model.model
        if arguments.outliers:
            plant_outliers(built, arguments.outliers)
        if kind is not None:
            emulate(built, kind)
        params = SamplingParams(return_log_probs=True, top_n_logprobs=1)
        requests = llm.score(sequences, sampling_params=params)
        words = []
        for request in requests:
            if request.error is not None:
                raise request.error
            found = None if request.log_probs is None else request.log_probs.prompt_words()
            assert found is not None, "they were asked for"
            words.append(found[1])
    del llm, built
    gc.collect()  # its memory is for the next one
    whole = np.concatenate(words)
    return whole[:, 0].view(np.float32), whole[:, 1]


def parse_setting(text: str) -> dict[str, Any]:
    """`name=value,name=value`, where a value is JSON or a word."""
    options: dict[str, Any] = {}
    for each in text.split(","):
        name, equals, value = each.partition("=")
        if not equals:
            raise ConfigurationError(f"{text!r}: {each!r} is no NAME=VALUE")
        options[name] = value
        with suppress(ValueError):
            options[name] = json.loads(value)
    return options


def make_sequences(arguments: argparse.Namespace) -> list[list[int]]:
    """Token ids of at least two in sequences of `--length`; all but each first one are scored."""
    source, count = open_model(arguments.model), arguments.tokens
    count += -(-count // (arguments.length - 1))
    if arguments.text:
        if source.tokenizer is None:
            raise ConfigurationError(f"{arguments.model} has no tokenizer: leave --text out")
        text = "\n\n".join(Path(file).read_text("utf-8") for file in arguments.text)
        ids = list(source.tokenizer.tokenize(text))[:count]
    else:
        draws = np.random.default_rng(0)
        ids = draws.integers(source.architecture.vocab_size, size=count).tolist()
    return [piece for piece in _pieces(ids, arguments.length) if len(piece) > 1]


def _pieces(ids: list[int], length: int) -> Iterator[list[int]]:
    for first in range(0, len(ids), length):
        yield ids[first : first + length]


def main(given: Sequence[str] | None = None) -> None:
    """Score by each setting, print a line for each but the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--settings", nargs="+", default=[PLAIN, "dtype=bfloat16"])
    parser.add_argument("--text", nargs="+", metavar="FILE", help="default: random token ids")
    parser.add_argument("--tokens", type=int, default=10_000, help="scored, at most")
    parser.add_argument("--length", type=int, default=512, help="of a sequence")
    parser.add_argument("--outliers", type=int, default=0, metavar="N", help="channels")
    parser.add_argument("--device")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args(given)
    if arguments.length < 2 or arguments.tokens < 1 or arguments.outliers < 0:
        parser.error("--length is at least 2, --tokens at least 1, --outliers at least 0")
    if arguments.outliers and not arguments.model.startswith("dummy:"):
        parser.error("--outliers is for dummy:SHAPE: other models have their own")
    sequences = make_sequences(arguments)
    first, *others = arguments.settings
    expected, likeliest = scores(first, sequences, arguments)
    print(f"{arguments.model}: {len(expected):,} tokens, compared with {first}", flush=True)
    print(f"mean log prob {expected.mean():.4f}", flush=True)
    figures = []
    for setting in others:
        found, best = scores(setting, sequences, arguments)
        distance = LogProbDistance.of(expected.tolist(), found.tolist())
        figure = {
            "setting": setting,
            "tokens": distance.tokens,
            "mean": distance.mean,
            "largest": distance.largest,
            "k3": distance.k3,
            "likeliest": float((best == likeliest).mean()),
            "shift": float(found.mean(dtype=np.float64) - expected.mean(dtype=np.float64)),
        }
        print(LINE.format(**figure), flush=True)
        figures.append(figure)
    if arguments.json:
        write_record(arguments.json, "quality", vars(arguments), figures)


if __name__ == "__main__":
    main()
