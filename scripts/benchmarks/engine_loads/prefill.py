"""Time to first token of one prompt on an idle engine, beside the floor that its work sets.

The floor is the larger of two. FLOPs: the products of all layers for every prompt token, causal
attention, and the vocabulary projection of the last token, at --tflops (790: bfloat16 on an H200,
dense, as cuBLAS reaches it). Bytes: the weights, read once, at --tbps. Time to first token is what
a user sees: from `add_request` to the step's resolve, chunk by chunk where the prompt is longer
than --max-tokens.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from kernel_cases.case import BANDWIDTH, MATRIX_RATE
from torch import nn

from engine_loads.options import add_model_options, load_parser, routed
from megatron_async import LLM, SamplingParams
from megatron_async.lab.benchmark_record import write_record
from megatron_async.models.pipeline import EMBEDDING, OUTPUT

PARAMS = SamplingParams(temperature=0.0, num_tokens_to_generate=2, termination_id=-1)


def flops(model: nn.Module, vocabulary: int, tokens: int) -> float:
    """Floating-point operations of a prompt's prefill by a `HybridModel` on one rank; of recurrent
    layers their products alone."""
    config: Any = model.config
    multiplied = 0.0
    for name, weight in model.named_parameters():
        if name in (EMBEDDING, OUTPUT) or weight.dim() < 2 or "conv1d" in name:
            continue
        is_stacked = weight.dim() == 3  # one matrix for each expert, of which a token meets some
        share = config.moe_router_topk / config.num_moe_experts if is_stacked else 1
        multiplied += weight.numel() * share
    heads, dim = config.num_attention_heads, config.kv_channels
    layers = config.hybrid_layer_pattern.count("*")
    attention = layers * 4 * heads * dim * tokens * (tokens + 1) / 2
    return 2.0 * multiplied * tokens + attention + 2.0 * config.hidden_size * vocabulary


def measure(llm: LLM, tokens: int, repeats: int) -> dict[str, float]:
    """Time to first token of `repeats` random prompts, one after another; the first warms up."""
    engine, times = llm.engine, []
    generator = torch.Generator().manual_seed(tokens)
    steps = engine.stats()["steps"]
    for number in range(repeats + 1):
        prompt = torch.randint(engine.controller.vocab_size, (tokens,), generator=generator)
        request = engine.generate([prompt], PARAMS)[0]
        if request.error is not None or request.ttft is None:
            raise SystemExit(f"a prompt of {tokens} tokens failed: {request.error}")
        if number:
            times.append(request.ttft * 1e3)
    while engine.has_unfinished_requests():
        engine.step_modern()
    return {
        "ttft_ms": statistics.median(times),
        "fastest_ms": min(times),
        "steps": (engine.stats()["steps"] - steps) / (repeats + 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = load_parser("prefill", __doc__, several=True)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8192], help="chunk sizes")
    parser.add_argument("--attention-backend", help="as in InferenceConfig")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tflops", type=float, default=MATRIX_RATE / 1e12, help="of the device, for the floor"
    )
    parser.add_argument(
        "--tbps", type=float, default=BANDWIDTH / 1e12, help="of its memory, for the floor"
    )
    add_model_options(parser)
    args = parser.parse_args(arguments)
    args.models = routed(args.models, args.routing)
    print(
        f"{'model':<22}{'prompt':>8}{'max_tokens':>12}{'steps':>7}{'ttft ms':>10}{'floor ms':>10}"
        f"{'ratio':>7}"
    )
    figures = []
    for name in args.models:
        for max_tokens in args.max_tokens:
            longest = max(args.prompt_tokens) + 8
            with LLM(
                name,
                enable_prefix_caching=False,  # prompts come again, and all are to be computed
                device=args.device,
                dtype=args.dtype,
                mamba_ssm_states_dtype=args.mamba_ssm_states_dtype,
                batch_invariant_mode=args.batch_invariant_mode,
                max_requests=4,
                max_tokens=max_tokens,
                max_sequence_length=longest,
                num_kv_blocks=2 * (-(-longest // 64)),
                block_size_tokens=64,
                attention_backend=args.attention_backend,
            ) as llm:
                if report := llm.engine.context.gpu_view.attention_report:
                    print(report)
                vocabulary = llm.engine.controller.vocab_size
                for tokens in args.prompt_tokens:
                    result = measure(llm, tokens, args.repeats)
                    model = llm.engine.controller.inference_wrapped_model.model
                    work = flops(model, vocabulary, tokens)
                    size = sum(weight.nbytes for weight in model.parameters())
                    floor = max(work / args.tflops, size / args.tbps) / 1e9
                    result |= {"floor_ms": floor, "over_floor": result["ttft_ms"] / floor}
                    figures.append(
                        {"model": name, "prompt": tokens, "max_tokens": max_tokens, **result}
                    )
                    print(
                        f"{name:<22}{tokens:>8}{max_tokens:>12}{result['steps']:>7.1f}"
                        f"{result['ttft_ms']:>10.2f}{floor:>10.2f}{result['over_floor']:>7.2f}",
                        flush=True,
                    )
    if args.json:
        write_record(args.json, "prefill", vars(args), figures)
