"""Checkpoints as a training run of Megatron-LM leaves them, written by Megatron's own code."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend, CudaGraphModule, InferenceCudaGraphScope
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async.checkpoints.torch_dist_strategy import SynchronousSaveStrategy
from megatron_async.models.parallel_state import ensure_process_groups

VOCABULARY = 96
LENGTH = 256

MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "layernorm_epsilon": 1e-3,
}
"""Arguments of every model here that `TransformerConfig` has too. The epsilon is large, so that
another one shows."""
CONFIG = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "attention_softmax_in_fp32": True,
    "moe_token_dispatcher_type": "allgather",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
ROPE = {
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "untie_embeddings_and_output_weights": True,
}
"""Arguments of `GPTModel`, by their names in the parser. The base is small, so that positions count
in short sequences."""


def parsed_args(**changes: Any) -> Namespace:
    """Arguments with one value of every class that those of a real run held.

    A command line of Megatron-LM core_r0.19.0 (Llama-like, distributed optimizer, recomputation,
    CUDA graphs; and one with experts) was given to `parse_args` and `validate_args` of
    `megatron/training/arguments.py`: 813 and 815 arguments, of them 77 str, 148 int, 63 float, 307
    bool, 200 None, 10 lists, 8 `torch.dtype` and the enums below. Names here are the parser's.
    """
    values = {
        **MODEL,
        **ROPE,
        "group_query_attention": True,
        "swiglu": True,
        "squared_relu": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "layernorm_zero_centered_gamma": False,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "max_position_embeddings": LENGTH,
        "padded_vocab_size": VOCABULARY,
        "num_experts": None,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "hybrid_layer_pattern": None,
        "window_size": None,
        "softmax_type": "vanilla",
        "lr": 3e-4,
        "recompute_modules": ["core_attn"],
        "params_dtype": torch.bfloat16,
        "exp_avg_dtype": torch.float32,
        "attention_backend": AttnBackend.flash,
        "inference_cuda_graph_scope": InferenceCudaGraphScope.layer,
        "cuda_graph_modules": [CudaGraphModule.attn],
        "exit_signal": Signals.SIGTERM,
    }
    return Namespace(**{**values, **changes})


def trained_model(args: Namespace, **config: Any) -> GPTModel:
    """This rank's part of the `GPTModel` that Megatron builds of `parsed_args`, in float32;
    `config` has further fields of `TransformerConfig`, such as sizes of groups."""
    groups = ensure_process_groups()
    names = [*MODEL, "add_qkv_bias", "qk_layernorm", "window_size", "moe_router_topk"]
    experts: dict[str, Any] = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts,
            "moe_layer_freq": args.moe_layer_freq,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "moe_shared_expert_gate": args.moe_shared_expert_gate,
            "moe_ffn_hidden_size": args.ffn_hidden_size,
            "moe_router_score_function": args.moe_router_score_function,
            "moe_router_enable_expert_bias": args.moe_router_enable_expert_bias,
            "moe_router_topk_scaling_factor": args.moe_router_topk_scaling_factor,
        }
    fields = {**CONFIG, **{name: getattr(args, name) for name in names}, **experts, **config}
    built = TransformerConfig(**fields)
    with without_gpu():
        model = GPTModel(
            built,
            get_gpt_decoder_block_spec(
                built, use_transformer_engine=False, normalization="RMSNorm"
            ),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            parallel_output=False,
            pg_collection=groups,
        )
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:  # a norm's factors, or biases
            parameter.data.copy_(1 + 0.3 * values)
        else:  # scores of queries and keys must be large, or positions would hardly matter
            width = 1.0 if "embedding" in name else parameter.size(1)
            scale = (4.0 if "linear_qkv" in name else 2.0) / math.sqrt(width)
            parameter.data.copy_(values * scale)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def save_run(
    model: GPTModel,
    folder: Path,
    args: Namespace,
    metadata: dict[str, Any] | None = None,
    strategy: Any = None,
    rename: Callable[[str], str] | None = None,
    **state: Any,
) -> None:
    """What `save_checkpoint` of Megatron-LM gives to `dist_checkpointing.save` for this rank's
    part; collective. `metadata` is for the model's `sharded_state_dict`, by default as training
    has it; without a `strategy` a shard's main replica writes all; `rename` gives a key another
    name; `state` has further entries, such as the optimizer's."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True} | (
        metadata or {}
    )
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    stored = model.sharded_state_dict(metadata=metadata)
    if rename is not None:
        for shard in nested_values(stored):
            shard.key = rename(shard.key)
    everything = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "num_floating_point_operations_so_far": 1.0,
        "model": stored,
        **state,
    }
    dist_checkpointing.save(everything, str(folder), strategy or SynchronousSaveStrategy())


@contextmanager
def without_gpu() -> Iterator[None]:
    """Two things that Megatron's models want of a GPU: a router has its weight and biases on the
    current device, and attention takes the random state of a GPU for dropout, which is 0."""
    no_tracker = SimpleNamespace(fork=nullcontext)
    with (
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda: no_tracker),
    ):
        yield


@torch.no_grad()
def megatron_log_probs(model: GPTModel, tokens: list[int]) -> torch.Tensor:
    """Log probabilities of the next token, float32 `[tokens, vocabulary]`, by Megatron's own
    forward of the whole sequence."""
    mask = torch.ones(1, 1, len(tokens), len(tokens)).triu(1).bool()
    with without_gpu():
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], mask)[0]
    return logits.float().log_softmax(-1)
