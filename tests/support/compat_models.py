"""Models as Megatron's users build them: `GPTModel` of Megatron's own local layer spec.

A user's own `GPTModel`, twice: with our attention in its layer spec, and all Megatron's.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import get_sliding_window_causal_mask

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    TextGenerationController,
)
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.models import serving_config
from megatron_async.models.attention import PagedCoreAttention, PagedSelfAttention
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from tests.support.harness import CpuDevice, watched

VOCABULARY = 96
LENGTH = 256
"""Positions of the models."""


_ON_A_CPU = {
    "ones": lambda *shape, dtype, device: torch.ones(shape, dtype=dtype),
    "bool": torch.bool,
    "triu": torch.triu,
    "tril": torch.tril,
}
window_mask = FunctionType(
    get_sliding_window_causal_mask.__code__, {"torch": SimpleNamespace(**_ON_A_CPU)}
)
"""Megatron's mask of a window, which it makes on a GPU."""


@contextmanager
def megatron_on_a_cpu() -> Iterator[None]:
    """Megatron's own forward asks for the current GPU and for its random numbers."""
    no_tracker = SimpleNamespace(fork=nullcontext)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(fused_softmax, "get_sliding_window_causal_mask", window_mask),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", return_value=no_tracker),
        torch.compiler.set_stance("force_eager"),  # its fusions would be compiled, for seconds
    ):
        yield


def config_of(**changes: Any) -> TransformerConfig:
    """Two layers of Megatron's `TransformerConfig`, which says nothing of rope."""
    fields = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "transformer_impl": "local",
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }
    # Megatron's models read these of a configuration, which has no such fields.
    yarn = {name: changes.pop(name) for name in list(changes) if name.startswith("yarn_")}
    config = TransformerConfig(**{**fields, **changes})
    for name, value in yarn.items():
        setattr(config, name, value)
    return config


def gpt_model(
    changes: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    sizes: ParallelSizes | None = None,
    seed: int = 0,
) -> GPTModel:
    """A float32 model on the CPU in training mode, whose tokens depend on the whole sequence before
    them; `changes` are of the configuration, `options` of `GPTModel`, `sizes` of the process
    groups."""
    sizes = sizes or ParallelSizes()
    config = config_of(
        tensor_model_parallel_size=sizes.tensor_model_parallel,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel,
        expert_model_parallel_size=sizes.expert_model_parallel,
        **(changes or {}),
    )
    groups = ensure_process_groups(sizes)
    with megatron_on_a_cpu():
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization
            ),
            vocab_size=VOCABULARY,
            pg_collection=groups,
            pre_process=groups.pp.rank() == 0,
            post_process=groups.pp.rank() == groups.pp.size() - 1,
            **{
                "max_sequence_length": LENGTH,
                "position_embedding_type": "rope",
                "share_embeddings_and_output_weights": True,
                **(options or {}),
            },
        )
    stage = groups.pp.rank()
    fill(model, seed, stage * config.num_layers // sizes.pipeline_model_parallel)
    return model


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0, first_layer: int = 0) -> None:
    """Lively weights, changed in place. They depend on a weight's name in the whole model
    (`first_layer` of this pipeline stage), and where ranks share it on the rank."""
    rank = int(os.environ.get("RANK", "0"))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "local_tokens" in name:
            continue
        steps = name.split(".")
        if "layers" in steps:
            steps[2] = str(int(steps[2]) + first_layer)
        is_shared = getattr(tensor, "tensor_model_parallel", False)
        is_shared |= not getattr(tensor, "allreduce", True)
        part = rank if is_shared and not first_layer and is_split(model) else 0
        number = crc32(".".join(steps).encode()) + 1000 * seed + part
        generator = torch.Generator().manual_seed(number)
        width = 1.0 if tensor.dim() == 1 or "embedding" in name else tensor.size(-1)
        # Scores of queries and keys must be large, or positions would hardly matter.
        scale = (4.0 if "linear_qkv" in name else 2.0) / math.sqrt(width)
        values = torch.randn(tensor.shape, generator=generator) * scale
        if tensor.dim() == 1:
            is_factor = "norm" in name and name.endswith("weight")
            values = (1.0 if is_factor else 0.0) + 0.15 * values
        tensor.copy_(values)


def is_split(model: Any) -> bool:
    """Whether ranks have other parts of a model's layers, and not other layers."""
    config = model.config
    return bool(config.tensor_model_parallel_size * config.expert_model_parallel_size > 1)


@torch.no_grad()
def logits_of(model: GPTModel, tokens: Sequence[int]) -> torch.Tensor:
    """float32 `[tokens, vocabulary]` by Megatron's own forward of a whole sequence."""
    ids = torch.tensor([list(tokens)])
    mask = torch.ones(1, 1, len(tokens), len(tokens)).triu(1).bool()
    with megatron_on_a_cpu():
        logits: torch.Tensor = model(
            ids, torch.arange(len(tokens))[None], mask, runtime_gather_output=True
        )[0]
    return logits


def engine_of(
    model: Any, *, with_serving_config: bool = False, device: Any = None, **settings: Any
) -> DynamicInferenceEngine:
    """The trio as a Megatron script makes it: context, wrapper, controller, engine."""
    defaults: dict[str, Any] = {
        "num_kv_blocks": 64,
        "max_requests": 4,
        "max_tokens": 48,
        "max_sequence_length": 128,
        "check_integrity": True,
    }
    inner = model.module if hasattr(model, "module") else model
    config = serving_config(inner.config, model=inner) if with_serving_config else inner.config
    context = DynamicInferenceContext(
        config, InferenceConfig(**{**defaults, **settings}), device or CpuDevice()
    )
    wrapper = GPTInferenceWrapper(model, context)
    return watched(DynamicInferenceEngine(TextGenerationController(wrapper), context))


def gpt_config(**changes: Any) -> TransformerConfig:
    """`config_of` as Megatron's own attention takes it."""
    return config_of(**{"attention_softmax_in_fp32": True, **changes})


def make_gpt(
    config: TransformerConfig,
    *,
    paged: bool = True,
    mask: AttnMaskType = AttnMaskType.causal,
    q_norm: Any = WrappedTorchNorm,
    k_norm: Any = WrappedTorchNorm,
    linear: tuple[Any, Any] = (ColumnParallelLinear, RowParallelLinear),
    **options: Any,
) -> GPTModel:
    """A float32 model on the CPU whose tokens depend on the whole sequence before them; its weights
    follow from `config` alone. It has our attention (`paged`) or Megatron's; `q_norm` and `k_norm`
    are norms of heads, where the configuration asks for them."""
    attention = ModuleSpec(
        module=PagedSelfAttention if paged else SelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear[0],
            core_attention=PagedCoreAttention if paged else DotProductAttention,
            linear_proj=linear[1],
            q_layernorm=q_norm if config.qk_layernorm else None,
            k_layernorm=k_norm if config.qk_layernorm else None,
        ),
    )
    products = MLPSubmodules(linear_fc1=linear[0], linear_fc2=linear[1])
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=partial(MLP.as_mlp_submodule, submodules=products),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH}
    options = {"position_embedding_type": "rope", **sizes, **options}
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        pg_collection=ensure_process_groups(),
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        width = 1.0 if parameter.dim() == 1 or "embedding" in name else parameter.size(1)
        # Scores of queries and keys must be large, or positions would hardly matter.
        scale = (4.0 if "linear_qkv" in name else 2.0) / math.sqrt(width)
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            values = 1 + 0.3 * values
        parameter.data.copy_(values * (scale if parameter.dim() > 1 else 1.0))
    return model.eval()
