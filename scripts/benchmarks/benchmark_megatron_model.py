"""Steady decode of a model that Megatron itself built, beside the same shape built by this package.

Both have random weights. The first is a `GPTModel` of Megatron's local layer spec behind
`megatron_async.compat`'s wrapper (docs/megatron_models.md), the second `LLM("dummy:SHAPE")`; their
engines take turns, so that the machine's moods meet both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from engine_loads.steady import WINDOWS
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from step_times import time_steps

from megatron_async import (
    LLM,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    TextGenerationController,
)
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from megatron_async.profiling.benchmark_record import write_record
from megatron_async.profiling.workloads import start_steady_decode

ROUNDS = 3


def megatron_model(shape: ModelArchitecture, device: torch.device) -> GPTModel:
    """A bfloat16 `GPTModel` of Megatron's, random weights."""
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.layernorm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=shape.qk_layernorm,
        add_qkv_bias=shape.add_qkv_bias,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=device.type == "cpu",
    )
    groups = ensure_process_groups(ParallelSizes())
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(0)
    with torch.device(device):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization="RMSNorm"
            ),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=int(shape.rotary_base),
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            pg_collection=groups,
        )
    return model.to(device=device, dtype=torch.bfloat16)


def settings(batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Of both engines."""
    length = args.prompt_tokens + (ROUNDS + 1) * WINDOWS * args.steps + 64
    return {
        "lookahead": 1, "max_requests": batch, "max_tokens": max(batch, args.prompt_tokens, 512),
        "max_sequence_length": length, "num_kv_blocks": batch * (length // 64 + 1),
        "block_size_tokens": 64, "num_cuda_graphs": 1,
        "use_cuda_graphs_for_non_decode_steps": False,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=DUMMY_SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help=f"in each of {WINDOWS} windows")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    shape, device = DUMMY_SHAPES[args.shape], torch.device(args.device)
    model = megatron_model(shape, device)
    print(f"{'shape':<16}{'batch':>6}{'Megatron-built ms':>20}{'ours ms':>10}{'ratio':>8}")
    figures = []
    for batch in args.batch_sizes:
        config = InferenceConfig(device=args.device, **settings(batch, args))
        context = DynamicInferenceContext(model.config, config)
        controller = TextGenerationController(GPTInferenceWrapper(model, context))
        theirs = DynamicInferenceEngine(controller, context)
        ours = LLM(f"dummy:{args.shape}", device=args.device, dtype="bfloat16",
                   **settings(batch, args))  # fmt: skip
        times: list[list[float]] = [[], []]
        steps = (ROUNDS + 1) * WINDOWS * args.steps
        for engine in (theirs, ours.engine):
            start_steady_decode(engine, batch, args.prompt_tokens, steps)
        for _ in range(ROUNDS):
            for engine, found in zip((theirs, ours.engine), times):
                found.append(time_steps(engine, WINDOWS, args.steps).step_ms)
        theirs.close()
        ours.close()
        del theirs, ours, context, controller
        one, other = map(statistics.median, times)
        figures.append({"batch": batch, "megatron_ms": one, "ours_ms": other, "ratio": one / other})
        print(
            f"{args.shape:<16}{batch:>6}{one:>20.3f}{other:>10.3f}{one / other:>8.3f}", flush=True
        )
    if args.json:
        write_record(args.json, "megatron_model", vars(args), figures)


if __name__ == "__main__":
    main()
