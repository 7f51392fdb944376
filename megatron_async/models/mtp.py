"""Multi-token prediction (MTP): small stacks of layers behind the model that predict the tokens
after the next one.

The module and its weights are Megatron-Core 0.19's (`transformer/multi_token_prediction.py`), after
DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437). For each position, a depth
takes the embedding of the next token and a hidden state at the position. For the first depth this
is the model's, after its final norm (in MiMo before it). For further depths it is the previous
depth's, after that depth's final norm. Embedding and output layer are the model's.
Unlike in Megatron's own inference, attention of MTP has KV layers in the engine's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import KINDS, MTP_KINDS, ModelArchitecture
from megatron_async.models.layer_ops import LayerOps
from megatron_async.models.linear import InferenceColumnParallelLinear
from megatron_async.models.model_config import ModelConfig
from megatron_async.models.norm import make_norm, normalised
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.ops.linear.stream import Stream

if TYPE_CHECKING:
    from megatron_async.models.step_view import StepView

REMEDY = "use speculative_method='ngram', which needs no weights, or none"


class MultiTokenPredictionLayer(MegatronModule):
    """One depth, with the parameter names of Megatron-Core's class of this name, of the same spec
    as the model's stack.

    Attributes:
        enorm, hnorm: norms of the embedding and of the hidden state.
        eh_proj: `[hidden, 2 hidden]`, of the normed embedding and the normed hidden state, in this
            order; ranks share its rows.
        mtp_model_layer: the stack of `mtp_pattern`, without a final norm of its own.
        final_layernorm: the norm after the stack.
    """

    ops = LayerOps()

    def __init__(
        self,
        config: ModelConfig,
        spec: ModuleSpec,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = make_norm(config, hidden, eps)
        self.hnorm = make_norm(config, hidden, eps)
        self.eh_proj = InferenceColumnParallelLinear(
            2 * hidden,
            hidden,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=True,
            skip_bias_add=False,
            is_expert=False,
            tp_group=groups.tp,
        )
        self.mtp_model_layer = spec.module(
            config,
            spec.submodules,
            layer_type_list=list(config.mtp_pattern),
            pg_collection=groups,
            is_mtp_layer=True,
        )
        self.final_layernorm = make_norm(config, hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, view: StepView) -> Tensor:
        """Hidden states of the next depth, `[tokens, 1, hidden]`, after its final norm, for the
        output layer.

        Args:
            embedded: `[tokens, 1, hidden]`, embeddings of the tokens after those of `hidden`.
            hidden: `[tokens, hidden]`: the model's (`StepView.mtp_hidden`), or the previous
                depth's, after its final norm.
            view: of a step with so many tokens: the places of their keys, and the keys that each
                token sees.
        """
        # The residual stream begins here.
        projected, _ = self.eh_proj(self.join(embedded, hidden)[:, None])
        stream = self.mtp_model_layer.run(Stream(projected.flatten(0, 1)), view)
        return normalised(self.ops, stream, self.final_layernorm)[0][:, None]

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The input of `eh_proj`, `[tokens, 2 hidden]`: each of the two normed, the embedding
        first."""
        parts = ((embedded.flatten(0, 1), self.enorm), (hidden, self.hnorm))
        normed = [normalised(self.ops, Stream(rows), norm)[0] for rows, norm in parts]
        return torch.cat(normed, dim=-1)


class MultiTokenPrediction(MegatronModule):
    """All depths of a model: in `layers` one for each that has weights of its own."""

    def __init__(
        self,
        config: ModelConfig,
        spec: ModuleSpec,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        depths = range(config.mtp_num_depths)
        self.layers = nn.ModuleList(MultiTokenPredictionLayer(config, spec, groups) for _ in depths)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Under Megatron's names, `mtp.layers.d.`; arguments as of `MegatronModule`."""
        found: dict[str, Any] = {}
        for depth, layer in enumerate(self.layers):
            assert isinstance(layer, MultiTokenPredictionLayer)
            inside = f"{prefix}layers.{depth}."
            found |= layer.sharded_state_dict(inside, sharded_offsets, metadata)
        return found


def check_mtp(architecture: ModelArchitecture, sizes: ParallelSizes) -> None:
    """Check that a model's layers of multi-token prediction can be built.

    Raises:
        ConfigurationError: the model has no MTP layers, or layers that are not served, or another
            setting is not served together with MTP.
    """
    a = architecture
    if not a.mtp_pattern:
        raise ConfigurationError(
            f"this {a.model_type} model has no layers of multi-token prediction (mtp_pattern = '')"
            f": {REMEDY}."
        )
    unserved = sorted(set(a.mtp_pattern) - set(MTP_KINDS))
    if unserved:
        names = " and ".join(f"{KINDS[kind]} ({kind})" for kind in unserved)
        raise ConfigurationError(
            f"{names} layers are not served in multi-token prediction, and this {a.model_type} "
            f"model's mtp_pattern is {a.mtp_pattern!r}: {REMEDY}."
        )
    settings = (
        # The last stage samples, and has no embedding.
        ("pipeline_model_parallel_size", sizes.pipeline_model_parallel, 1),
        ("sequence_parallel", sizes.sequence_parallel and sizes.tensor_model_parallel > 1, False),
    )
    for name, value, served in settings:
        if value != served:
            raise ConfigurationError(
                f"{name}={value!r} is not served with multi-token prediction: use {served!r}, or "
                f"{REMEDY}."
            )
