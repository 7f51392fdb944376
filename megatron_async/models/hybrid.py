"""Build a Megatron-Core model for the engine from a `ModelArchitecture`.

All models are Megatron's `HybridModel` with a layer pattern (`hybrid_stack.py` has the spec).
Parameter names are Megatron's, so checkpoints of Megatron and of this engine load in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from zlib import crc32

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.embedding import shard_vocabulary
from megatron_async.models.held_weight import lay_out_quantised
from megatron_async.models.hybrid_stack import hybrid_stack_spec
from megatron_async.models.model_config import ModelConfig, transformer_config
from megatron_async.models.mtp import MultiTokenPrediction, check_mtp
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from megatron_async.models.partition import check_partition, padded_vocab_size
from megatron_async.models.pipeline import EMBEDDING, OUTPUT, stage_of
from megatron_async.ops.linear.quantised_layout import Layout
from megatron_async.ops.linear.quantised_weight import QuantisedWeight

TRANSFORMER_IMPLS = ("local", "transformer_engine")
"""Values of Megatron's `transformer_impl` that are served."""
ROOT_MEAN_SQUARE = {"INT4": 4.637, "FP4": 2.926}
"""Size of the 16 numbers, of INT4 less 8."""
PART = 2**24
"""Random numbers that are drawn at once: 64 MiB beside the weights."""


def stack_spec(config: TransformerConfig, device: torch.device) -> ModuleSpec:
    """The layer spec that `config.transformer_impl` names, for a model on `device`.

    Raises:
        ConfigurationError: no such spec, or it cannot run here.
    """
    if config.transformer_impl == "local":
        return hybrid_stack_spec(config)
    if config.transformer_impl == "transformer_engine":
        from megatron_async.models import transformer_engine_spec

        transformer_engine_spec.require_transformer_engine(device)
        return transformer_engine_spec.transformer_engine_stack_spec(config)
    raise ConfigurationError(
        f"transformer_impl={config.transformer_impl!r} is unknown: use one of "
        f"{', '.join(map(repr, TRANSFORMER_IMPLS))}."
    )


def build_model(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    device: torch.device,
    transformer_impl: str = "local",
    sizes: ParallelSizes | None = None,
    with_mtp: bool = False,
    layouts: Callable[[HybridModel], Mapping[str, Layout]] | None = None,
) -> HybridModel:
    """A `HybridModel` with uninitialised weights on `device`, in eval mode, without gradients.

    It is built on the meta device first, so that memory is allocated only once. Its `mtp` is a
    `MultiTokenPrediction`, or None; its `architecture` is the argument, of the whole model.

    Args:
        architecture: of the model.
        dtype: of the weights and of the computation.
        device: where the weights are.
        transformer_impl: implementation of the layers, by Megatron's names: "local"
            (`hybrid_stack_spec` as it is) or "transformer_engine".
        sizes: over how many ranks the model is split; this process gets its part. None: one rank.
        with_mtp: build its layers of multi-token prediction too. (Megatron-Core's own block is
            never built.)
        layouts: of weights that are kept quantised, by parameter, of the model before it has
            memory; None: there are none.

    Raises:
        ConfigurationError: see `stack_spec`, `check_partition`, `check_mtp`,
            `ensure_process_groups` and `lay_out_quantised`.
    """
    check_partition(architecture, sizes or ParallelSizes(), transformer_impl)
    if with_mtp:
        check_mtp(architecture, sizes or ParallelSizes())
    groups = ensure_process_groups(sizes)
    config = transformer_config(architecture, dtype, sizes, with_mtp)
    config.transformer_impl = transformer_impl
    config.pipeline_stage = groups.pp.rank()
    spec, tied = stack_spec(config, device), architecture.tie_word_embeddings
    longest = architecture.max_position_embeddings
    model = lay_out(config, spec, groups, architecture.vocab_size, longest, tied, with_mtp)
    config.vocab_size = model.vocab_size
    model.architecture = architecture
    if layouts is not None:
        lay_out_quantised(model, layouts(model))
    # As `to_empty`, whose `empty_like` asks torch for strides, which imports sympy.
    model._apply(lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device))
    return model.eval().requires_grad_(False)


def lay_out(
    config: ModelConfig,
    spec: ModuleSpec,
    groups: ProcessGroupCollection,
    vocab_size: int,
    max_sequence_length: int,
    is_tied: bool,
    with_mtp: bool = False,
) -> HybridModel:
    """A `HybridModel` on the meta device, in the dtype of its configuration but for parameters that
    must be float32. `vocab_size` is the tokenizer's."""
    stage = stage_of(config)
    with torch.device("meta"):
        model = HybridModel(
            config=config,
            hybrid_stack_spec=spec,
            vocab_size=padded_vocab_size(vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=max_sequence_length,
            hybrid_layer_pattern=config.hybrid_layer_pattern,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            parallel_output=False,
            share_embeddings_and_output_weights=is_tied,
            # Rotary is applied by position inside PagedSelfAttention.
            position_embedding_type="none",
            pg_collection=groups,
        )
        # Behind all else: its KV layers are numbered in this order.
        model.mtp = MultiTokenPrediction(config, spec, groups) if with_mtp else None
    shard_vocabulary(model, vocab_size)
    model.to(dtype=config.params_dtype)
    for module in model.modules():
        for name in getattr(module, "float32_parameters", ()):
            if (kept := getattr(module, name)) is not None:
                kept.data = kept.data.float()
    return model


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill a model with random weights, made on its own device.

    Norms multiply by 1. Recurrent layers' own parameters have Megatron-Core's initial values. All
    other weights are N(0, 0.02), so that activations stay finite and logits differ. A weight
    depends on its name in the whole model, so it is the same for any pipeline stages.
    """
    stage = stage_of(model.config)
    zero_centered = bool(getattr(model.config, "layernorm_zero_centered_gamma", False))
    for name, parameter in model.named_parameters():
        is_tied = name == OUTPUT and model.share_embeddings_and_output_weights
        known = EMBEDDING if is_tied else stage.global_name(name)
        fill_dummy_weight(known, parameter.data, seed, zero_centered)


def fill_dummy_codes(name: str, weight: QuantisedWeight, seed: int = 0) -> None:
    """Random numbers of a whole 4-bit weight, by its name in the whole model, whose values are
    about as large as those of `fill_dummy_weight`: any codes, and scales that differ."""
    generator = torch.Generator(weight.device).manual_seed(seed + crc32(name.encode()))
    weight.codes.random_(0, 256, generator=generator)
    scale = 0.02 / ROOT_MEAN_SQUARE[weight.form.numbers]
    if weight.outer is not None:
        weight.outer.fill_(scale)
        scale = 1.0
    if weight.scales.dtype == torch.uint8:  # exponents
        middle = 127 + round(math.log2(scale))
        weight.scales.random_(middle - 1, middle + 1, generator=generator)
    else:
        drawn = torch.empty_like(weight.scales, dtype=torch.float32)
        weight.scales.copy_(drawn.uniform_(0.75 * scale, 1.25 * scale, generator=generator))


def fill_dummy_weight(
    name: str, weight: Tensor, seed: int = 0, zero_centered: bool = False
) -> None:
    """The numbers of `init_dummy_weights` for one whole weight, by its name in the whole model,
    whose norms multiply by 1 + weight if `zero_centered`. They are drawn in float32, so that a
    model of another dtype has the same ones, rounded."""
    generator = torch.Generator(weight.device).manual_seed(seed + crc32(name.encode()))
    if weight.dim() > 1 and "conv1d" not in name:
        for part in weight.view(-1).split(PART):
            drawn = torch.empty_like(part, dtype=torch.float32)
            part.copy_(drawn.normal_(0.0, 0.02, generator=generator))
        return
    drawn = torch.empty_like(weight, dtype=torch.float32)
    if weight.dim() == 1 and ("norm" in name or name.endswith(".D")):
        drawn.fill_(0.0 if zero_centered and "norm" in name else 1.0)
    elif name.endswith(".A_log"):
        drawn.uniform_(1, 16, generator=generator).log_()
    elif name.endswith(".dt_bias"):
        # softplus of it is spread evenly over the magnitudes between these two
        drawn.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
        drawn.add_(torch.log(-torch.expm1(-drawn)))
    elif weight.dim() == 1:
        drawn.zero_()
    else:
        drawn.uniform_(-0.5, 0.5, generator=generator)
    weight.copy_(drawn)
