"""How far the log probs of training are from those of generation: same weights, same tokens.

Megatron-Core's own `GPTModel` of some layers of a shape, with random weights, trains; the engine
serves the same parameters. The engine generates --tokens tokens, greedy and as many sampled, behind
prompts of different lengths, all at once; the model's training forward gives log probs of the same
tokens. All log probs are by one log softmax. Each line has the mean and the largest difference, K3
(the mean of exp(d) - d - 1, where d is training less generation), how many are equal to the bit,
and how many tokens are the likeliest in training (of greedy ones all should be).

Random weights make flat distributions: the final norm is scaled until the mean entropy of the next
token is --entropy nats. Engines: "fast", and "stable" (`batch_invariant_mode`, on a Hopper GPU).

Training:
  local        layers of the local spec as they are; attention rounds its scores (on a GPU)
  flash        the same, but for PyTorch's flash attention, as TransformerEngine would run one
  deterministic   the same, and PyTorch adds outputs of experts in one order (--deterministic-mode)
  transformer_engine   its spec, where it is installed
  engine       `use_engine_forward`; the differences are 0 beside a stable engine
"against itself" compares training with training: batches of one row, and of four.

--by-layer gives each layer, with the engine's arithmetic, the input that it has in training, and
prints how many elements of its output differ.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatron_async.models.compile_later  # noqa: F401  # isort: skip  # before Megatron-Core

from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.checkpoints.source import DTYPES, parse_dtype
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.models.training import token_log_probs, use_engine_forward
from megatron_async.devices import make_device
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.divergence import LogProbDistance
from megatron_async.llm import compile_ahead
from megatron_async.models.architecture import ATTENTION, EXPERTS, MLP
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import transformer_config
from megatron_async.models.parallel_state import ensure_process_groups
from megatron_async.ops.compile_kernels import KernelStart, describe_gpu

STOCK = ("local", "flash", "deterministic", "transformer_engine")
LINE = (
    "{engine:15} {training:19} {sampling:8} {tokens:6} tokens: mean {mean:.2e}, largest "
    "{largest:.2e}, K3 {k3:.2e}; same bits {same_bits:.4f}, likeliest {likeliest:.4f}"
)
LAYER = "layer {layer} of {training}: {differing:.4f} of elements differ, distance {distance:.2e}"
ADDED = ("linear_proj.weight", "linear_fc2.weight")
"""Ends of names of weights whose products are added to the residual stream."""
SHORTEST = 16
"""Tokens of the first prompt."""


@dataclass
class Rollouts:
    """Whole sequences, lengths of their prompts, and the engine's log probs of the other tokens."""

    sequences: list[list[int]]
    prompts: list[int]
    log_probs: list[float]


class FlashAttention(nn.Module):
    """In the place of a layer's `core_attention`: scores stay float32."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """`[length, rows, heads, dim]` each; gives `[length, rows, heads * dim]`."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=True
            )
        return y.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def training_as(model: Any, name: str) -> Iterator[None]:
    """Inside, the model's forward is the one of this name."""
    attentions = [layer.self_attention for layer in model.decoder.layers]
    cores = [attention.core_attention for attention in attentions]
    if name in ("flash", "deterministic"):
        for attention in attentions:
            attention.core_attention = FlashAttention(attention.core_attention.softmax_scale)
    torch.use_deterministic_algorithms(name == "deterministic", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        for attention, core in zip(attentions, cores, strict=True):
            attention.core_attention = core


@contextmanager
def megatron_on_a_cpu() -> Iterator[None]:
    """Megatron's forward asks for the current GPU and its random numbers, and compiles its fusions
    for seconds."""
    no_tracker = SimpleNamespace(fork=nullcontext)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", return_value=no_tracker),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def training_model(args: argparse.Namespace, shape_name: str) -> Any:
    """The first layers of a shape in Megatron's own modules, with random weights."""
    shape = DUMMY_SHAPES[shape_name]
    if set(shape.pattern) - {ATTENTION, MLP, EXPERTS} or len(shape.pattern) % 2:
        raise SystemExit(
            f"{shape_name}: its recurrent layers are mamba-ssm's or flash-linear-attention's in "
            "training, which this does not compare: name a shape of attention and MLPs or experts."
        )
    shape = replace(shape, num_layers=args.layers, pattern=shape.pattern[: 2 * args.layers])
    dtype, is_gpu = parse_dtype(args.dtype), args.device != "cpu"
    config: Any = transformer_config(shape, dtype)
    config.num_layers = args.layers
    config.attention_softmax_in_fp32 = True
    config.masked_softmax_fusion = False
    config.bias_activation_fusion = is_gpu and shape.activation == "silu"  # torch compiles it
    config.moe_router_dtype = "fp32"
    groups = ensure_process_groups()
    if is_gpu:
        model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    is_te = "transformer_engine" in args.training
    spec = get_gpt_decoder_block_spec(config, is_te, normalization="RMSNorm")
    scaling = shape.rope_scaling
    with torch.device(args.device):
        model = GPTModel(
            config, spec, shape.vocab_size, args.length, pg_collection=groups,
            position_embedding_type=shape.position_embedding_type,
            rotary_percent=shape.rotary_percent,
            rotary_base=int(shape.rotary_base), rope_scaling=scaling is not None,
            rope_scaling_factor=scaling.factor if scaling else 8.0,
        )  # fmt: skip
    model = model.to(dtype=dtype, device=args.device)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        # As Megatron's initial values: what is added to the stream shrinks with the layers.
        gain = 1.5 * (args.layers**-0.5 if name.endswith(ADDED) else 1.0)
        scale = 1.0 if "embedding" in name else gain * parameter.size(-1) ** -0.5
        parameter.data.normal_(0.0, scale)
    return model


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Of the training forward, `[rows, length, vocabulary]`. A CPU has to be given its mask."""
    length = ids.size(1)
    mask = None if ids.is_cuda else torch.ones(1, 1, length, length).triu(1).bool()
    at = torch.arange(length, device=ids.device)[None]
    found: Tensor = model(ids, at, mask, runtime_gather_output=True)
    return found


def set_entropy(model: Any, ids: Tensor, wanted: float) -> tuple[float, float]:
    """Scale the final norm for this mean entropy, nats: the factor, and the entropy found."""
    norm = model.decoder.final_layernorm.weight.data
    logits = logits_of(model, ids)[0].float()

    def entropy(scale: float) -> float:
        log_probs = (scale * logits).log_softmax(-1)
        return float(-(log_probs.exp() * log_probs).sum(-1).mean())

    low, high = 2.0**-8, 2.0**8
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if entropy(middle) > wanted else (low, middle)
    norm.fill_(low)
    return float(norm[0]), entropy(float(norm[0]))


def prompt_lengths(args: argparse.Namespace) -> list[int]:
    """From 16 tokens to --longest-prompt."""
    step = (args.longest_prompt - SHORTEST) // max(1, args.rows - 1)
    return [SHORTEST + step * number for number in range(args.rows)]


def settings(args: argparse.Namespace, stable: bool) -> dict[str, Any]:
    """Of an engine with room for all rollouts."""
    return {
        "lookahead": 1,
        "block_size_tokens": 64,
        "num_kv_blocks": 2 * args.rows * -(-args.length // 64) + 1,
        "max_sequence_length": args.length,
        "max_requests": 2 * args.rows,
        "max_tokens": 512,
        "choices": "shipped",
        "batch_invariant_mode": stable,
    }


def compile_kernels(args: argparse.Namespace, shape: str, stable: bool) -> KernelStart | None:
    """Begin to compile an engine's kernels, on all cores."""
    if args.device == "cpu":
        return None
    gpu = describe_gpu(torch.device(args.device))
    graphs = {"num_cuda_graphs": 1}  # whose sizes are compiled for
    return compile_ahead(f"dummy:{shape}", gpu, args.dtype, **settings(args, stable) | graphs)


def generate(model: Any, args: argparse.Namespace, stable: bool) -> dict[str, Rollouts]:
    """Rollouts of a new engine on the model's parameters, greedy and sampled."""
    config = InferenceConfig(device=args.device, num_cuda_graphs=0, **settings(args, stable))
    context = DynamicInferenceContext(model.config, config, make_device(args.device))
    controller = TextGenerationController(GPTInferenceWrapper(model, context))
    engine = DynamicInferenceEngine(controller, context)
    choose = torch.Generator().manual_seed(1)
    lengths = prompt_lengths(args)
    vocabulary = model.vocab_size
    prompts = [torch.randint(vocabulary, (n,), generator=choose).tolist() for n in lengths]
    params = [
        SamplingParams(
            num_tokens_to_generate=args.answer, termination_id=-1, temperature=temperature,
            seed=number, return_log_probs=True, skip_prompt_log_probs=True,
        )
        for temperature in (0.0, 1.0)
        for number in range(args.rows)
    ]  # fmt: skip
    made, found = engine.generate(prompts * 2, params), {}
    for name, some in (("greedy", made[: args.rows]), ("sampled", made[args.rows :])):
        pairs = zip(prompts, some, strict=True)
        sequences = [[*prompt, *each.generated_tokens] for prompt, each in pairs]
        log_probs = [value for each in some for value in each.generated_log_probs or ()]
        found[name] = Rollouts(sequences, lengths, log_probs)
    engine.close()
    return found


def score(model: Any, rollouts: Rollouts, device: str, rows: int = 4) -> tuple[list[float], float]:
    """The training forward's log probs of the generated tokens, `rows` sequences at once, and the
    share of these tokens that are the likeliest."""
    log_probs: list[float] = []
    likeliest = 0
    sequences = rollouts.sequences
    for first in range(0, len(sequences), rows):
        some = sequences[first : first + rows]
        longest = -(-max(map(len, some)) // 64) * 64
        ids = torch.zeros(len(some), longest, dtype=torch.int64, device=device)
        for row, tokens in enumerate(some):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        logits = logits_of(model, ids)
        for row, tokens in enumerate(some):
            start = rollouts.prompts[first + row]
            mine, told = logits[row, start - 1 : len(tokens) - 1], ids[row, start : len(tokens)]
            log_probs += token_log_probs(mine, told).tolist()
            likeliest += int((mine.argmax(-1) == told).sum())
    return log_probs, likeliest / len(log_probs)


@contextmanager
def noting_layers(model: Any, noted: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, inputs and outputs of the model's layers are noted."""

    def note(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        noted.append((x.clone(), output[0].clone()))

    layers = model.decoder.layers
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def compare_layers(
    model: Any, noted: dict[str, list[tuple[Tensor, Tensor]]]
) -> Iterator[dict[str, Any]]:
    """How far each layer's output with the engine's arithmetic is from that of training, of the
    same input: `model` has the engine's forward by now."""
    for name, pairs in noted.items():
        for number, (layer, (x, theirs)) in enumerate(
            zip(model.decoder.layers, pairs, strict=True)
        ):
            ours = layer(hidden_states=x, attention_mask=None)[0].float() - x.float()
            changed = theirs.float() - x.float()
            yield {
                "training": name,
                "layer": number,
                "differing": float((ours != changed).float().mean()),
                "distance": float((ours - changed).norm() / changed.norm()),
            }


@torch.no_grad()
def measure(args: argparse.Namespace, shape: str) -> Iterator[dict[str, Any]]:
    """All lines of a shape."""
    kernels = compile_kernels(args, shape, stable=False)
    model = training_model(args, shape)
    ids = torch.randint(model.vocab_size, (1, min(256, args.length)), device=args.device)
    with training_as(model, args.training[0]):
        scale, entropy = set_entropy(model, ids, args.entropy)
    print(f"{shape}: final norm times {scale:.3g}, entropy {entropy:.2f} nats", flush=True)
    line: Any = partial(dict, shape=shape, entropy=entropy)
    noted: dict[str, list[tuple[Tensor, Tensor]]] = {}
    engines = ["fast"] + ["stable"] * (args.device != "cpu")
    for engine in engines:
        if kernels is not None:
            kernels.join()
        if engine == "fast":
            kernels = compile_kernels(args, shape, stable=True)  # while the fast engine runs
        made = generate(model, args, engine == "stable")
        for training in args.training:
            with training_as(model, training):
                for sampling, rollouts in made.items():
                    scores, likeliest = score(model, rollouts, args.device)
                    names = {"engine": engine, "training": training, "sampling": sampling}
                    yield line(names | told(rollouts.log_probs, scores, likeliest))
                    if sampling == "sampled" and engine == engines[-1]:
                        names["engine"] = "against itself"
                        alone, _ = score(model, rollouts, args.device, rows=1)
                        yield line(names | told(alone, scores, likeliest))
                if args.by_layer and engine == engines[-1]:
                    with noting_layers(model, noted.setdefault(training, [])):
                        logits_of(model, ids)
    use_engine_forward(model)
    for sampling, rollouts in made.items():
        scores, likeliest = score(model, rollouts, args.device)
        names = {"engine": engine, "training": "engine", "sampling": sampling}
        yield line(names | told(rollouts.log_probs, scores, likeliest))
    for row in compare_layers(model, noted):
        yield line(row)


def told(generated: Sequence[float], scores: Sequence[float], likeliest: float) -> dict[str, Any]:
    """The figures of a line."""
    same = sum(a == b for a, b in zip(generated, scores, strict=True)) / len(scores)
    distance = LogProbDistance.of(generated, scores)
    return {**vars(distance), "same_bits": same, "likeliest": likeliest}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b", "qwen3-30b-a3b"])
    parser.add_argument("--layers", type=int, default=4, help="of each shape (default 4)")
    parser.add_argument("--tokens", type=int, default=10_000, help="to be generated, twice")
    parser.add_argument("--answer", type=int, default=250, help="tokens of a rollout")
    parser.add_argument("--longest-prompt", type=int, default=1000, help="tokens (default 1000)")
    parser.add_argument("--entropy", type=float, default=2.0, help="nats a token (default 2)")
    parser.add_argument("--training", nargs="+", choices=STOCK, default=["local", "flash"])
    parser.add_argument("--by-layer", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    is_te = "transformer_engine" in args.training
    if is_te and (len(args.training) > 1 or find_spec("transformer_engine") is None):
        parser.error("transformer_engine must be installed, and the only --training")
    args.rows = max(1, args.tokens // args.answer)
    args.length = prompt_lengths(args)[-1] + args.answer
    figures = []
    with megatron_on_a_cpu() if args.device == "cpu" else nullcontext():
        for shape in args.shapes:
            for row in measure(args, shape):
                figures.append(row)
                print(LAYER.format(**row) if "layer" in row else LINE.format(**row), flush=True)
    if args.json:
        settings = {k: v for k, v in vars(args).items()}
        write_record(args.json, "training_gap", settings, figures)


if __name__ == "__main__":
    main()
