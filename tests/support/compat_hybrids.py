"""Megatron's `HybridModel` with Megatron's own stack, mixers and experts.

Its Mamba-2 mixer calls two functions of mamba-ssm and its Gated DeltaNet one of
flash-linear-attention, which are for GPUs. On a CPU the formulas of these functions in plain
PyTorch stand here; all else (projections, strips, convolutions, groups, norms) is Megatron's code.
On a GPU the Mamba-2 mixer calls mamba-ssm and causal-conv1d themselves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common as delta_common
from megatron.core.ssm.gated_delta_net import gdn
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_async.models.parallel_state import ensure_process_groups
from tests.support.compat_models import LENGTH, VOCABULARY, config_of, fill, megatron_on_a_cpu

MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_state_dim": 16, "mamba_num_groups": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "deterministic_mode": True,
}


class GroupedNorm(torch.nn.Module):
    """RMSNorm of each group, for mamba-ssm's gated norm without a gate."""

    def __init__(
        self, size: int, eps: float, group_size: int, dtype: torch.dtype, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        groups = y.float().unflatten(-1, (-1, self.group_size))
        normed = torch.rms_norm(groups, (self.group_size,), None, self.eps).flatten(-2)
        return (normed * self.weight.float()).to(y.dtype)


GroupedNorm.__name__, GroupedNorm.__module__ = "ExtendedRMSNorm", "megatron.core.ssm.mamba_mixer"


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    rate: torch.Tensor,
    D: torch.Tensor,  # mamba-ssm's name
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """What mamba-ssm's `mamba_split_conv1d_scan_combined` gives: convolution, the recurrence token
    by token (Dao and Gu 2024), the skip D and the gate. `zxbcdt` is `[batch, tokens, z, x, B, C and
    dt]`, `weight` `[channels, taps]`; `dt_bias`, `rate` (the decay) and `D` are `[heads]`."""
    batch, tokens, _width = zxbcdt.shape
    dtype, zxbcdt = zxbcdt.dtype, zxbcdt.float()  # as the kernels, which round what they return
    weight, bias = weight.float(), bias.float()
    heads, inner = len(rate), len(rate) * headdim
    size = (weight.size(0) - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, weight.size(0), heads], -1)
    taps = weight.size(1)
    padded = F.pad(xbc.transpose(1, 2), (taps - 1, 0))
    xbc = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    x, b, c = xbc.split([inner, ngroups * size, ngroups * size], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        part.unflatten(-1, (ngroups, size)).repeat_interleave(heads // ngroups, 2)
        for part in (b, c)
    )
    dt = F.softplus(dt + dt_bias)
    state = torch.zeros(batch, heads, headdim, size)
    rows = []
    for t in range(tokens):
        decay = (dt[:, t] * rate).exp()[..., None, None]
        state = decay * state + torch.einsum("bhp,bhn,bh->bhpn", x[:, t], b[:, t], dt[:, t])
        rows.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + D[:, None] * x[:, t])
    y = torch.stack(rows, 1).flatten(2)
    return (y * F.silu(z)).to(dtype)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """flash-linear-attention's: of the last dimension, in float32."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@contextmanager
def hybrids_on_a_cpu() -> Iterator[None]:
    """Megatron's mixers and its stack run, with plain formulas for what other packages compute."""
    with ExitStack() as stack:
        stack.enter_context(megatron_on_a_cpu())
        for module, name, value in (
            (mamba_mixer, "HAVE_MAMBA_SSM", True),
            (mamba_mixer, "ExtendedRMSNorm", GroupedNorm),
            (mamba_mixer, "mamba_split_conv1d_scan_combined", split_conv1d_scan),
            (mamba_mixer, "get_cuda_rng_tracker", megatron_tracker),
            (delta_common, "HAVE_FLA", True),
            (delta_common, "l2norm", l2norm),
            (delta_common, "get_cuda_rng_tracker", megatron_tracker),
            (gdn, "chunk_gated_delta_rule", None),
            (hybrid_block, "TENorm", WrappedTorchNorm),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@contextmanager
def hybrids_on_a_gpu() -> Iterator[None]:
    """Megatron's mixers call the packages. Its stack asks for TransformerEngine's norm, which need
    not be there."""
    with (
        mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def megatron_tracker() -> Any:
    from megatron.core import tensor_parallel

    return tensor_parallel.get_cuda_rng_tracker()


def stack_spec(qk_norm: bool) -> ModuleSpec:
    """Megatron's stack of Megatron's layers with torch's norms and Megatron's linear layers."""
    linear = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    head_norm = WrappedTorchNorm if qk_norm else None
    LocalSpecProvider().layer_norm(rms_norm=True)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm,
                    mixer=ModuleSpec(
                        module=mamba_mixer.MambaMixer,
                        submodules=mamba_mixer.MambaMixerSubmodules(
                            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                        ),
                    ),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            gdn_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=WrappedTorchNorm,
                    self_attention=ModuleSpec(
                        module=gdn.GatedDeltaNet,
                        submodules=delta_common.GatedDeltaNetSubmodules(
                            in_proj=ColumnParallelLinear,
                            out_norm=WrappedTorchNorm,
                            out_proj=RowParallelLinear,
                        ),
                    ),
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=WrappedTorchNorm,
                    self_attention=ModuleSpec(
                        module=SelfAttention,
                        params={"attn_mask_type": AttnMaskType.causal},
                        submodules=SelfAttentionSubmodules(
                            linear_qkv=ColumnParallelLinear,
                            core_attention=LocalSpecProvider().core_attention(),
                            linear_proj=RowParallelLinear,
                            q_layernorm=head_norm,
                            k_layernorm=head_norm,
                        ),
                    ),
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm,
                    mlp=partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(**linear)),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm,
                    mlp=get_moe_module_spec(use_te=False, num_experts=4),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
        ),
    )


def hybrid_model(
    pattern: str, kind: type = HybridModel, device: str = "cpu", **changes: Any
) -> HybridModel:
    """A lively model of a layer pattern, float32 if its configuration says nothing else. `device`
    is "cuda" where mamba-ssm is installed, and Megatron's random numbers are seeded. `changes` are
    of the configuration, and of the model's arguments (`options`)."""
    options = {"share_embeddings_and_output_weights": False, **changes.pop("options", {})}
    config = config_of(num_layers=len(pattern), **changes)
    groups = ensure_process_groups()
    spec_name = "hybrid_stack_spec" if kind is HybridModel else "mamba_stack_spec"
    with hybrids_on_a_cpu() if device == "cpu" else hybrids_on_a_gpu():
        model = kind(
            config=config,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            hybrid_layer_pattern=pattern,
            pg_collection=groups,
            **{spec_name: stack_spec(config.qk_layernorm)},
            **options,
        ).to(device)
    fill(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # slow decay, so that states remember the whole sequence
                values = 0.01 + 0.2 * torch.rand(parameter.shape, generator=generator)
                parameter.copy_(values.log())
            elif name.endswith("dt_bias"):
                parameter.fill_(-1.0)
            elif name.endswith("conv1d.weight") or name.endswith("conv1d_weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model
