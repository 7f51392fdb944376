"""A user's `GPTModel` in Megatron's own modules, but for attention, products and the vocabulary.

For what the engine's layers do not compute and Megatron's modules do: LayerNorm, biases, GELU and
other activations, learned positions. The tree of modules is made anew, because modules carry what
differs between training and serving (`training`, hooks, their class, rope); the parameters in it
are the user's own objects.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron_async.models.attention import PagedCoreAttention, PagedSelfAttention
from megatron_async.models.embedding import InferenceEmbedding, InferenceOutputLayer
from megatron_async.models.linear import (
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
)
from megatron_async.models.model_config import ModelConfig

HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs")))
"""Attributes of a module that hold what others have asked it to call."""
GRAPHS = "cudagraph_manager"
"""Attribute of Megatron's own engine, which captures layer by layer."""


class PositionedEmbedding(InferenceEmbedding):
    """Megatron's `LanguageModelEmbedding` with the engine's lookup, and learned positions if the
    model has them."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, tokentype_ids: Any = None
    ) -> Tensor:
        """Embeddings of a step's tokens, `[tokens, 1, hidden]`; ids and positions are int64 `[1,
        tokens]`, and positions are not read unless they are learned."""
        rows = super().forward(input_ids)
        if not self.add_position_embedding:
            return rows
        assert position_ids is not None, "the wrapper gives them"
        positions: Tensor = self.position_embeddings(position_ids.flatten())
        return rows + positions[:, None]


def their_modules(model: GPTModel, config: ModelConfig) -> nn.Module:
    """The served model, which shares all parameters and buffers with the user's, which is not
    changed; `config` is for every module whose configuration is the model's."""
    served = _copied(model, model.config, config, {})
    served.mtp_process = False
    served.embedding.__class__ = PositionedEmbedding
    served.output_layer.__class__ = InferenceOutputLayer
    served.output_layer.vocab_size = model.vocab_size
    return served.eval()


def _copied(module: Any, theirs: Any, ours: ModelConfig, done: dict[int, Any]) -> Any:
    """`module` and all modules in it anew, with the same parameters and buffers, and our
    configuration for theirs; `done` has modules that were copied before, by `id`: a module may be
    in several places."""
    if id(module) in done:
        return done[id(module)]
    made = copy.copy(module)
    done[id(module)] = made
    state = vars(made)
    for name in HOOKS:
        if name in state:
            state[name] = type(state[name])()
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        state[name] = copy.copy(state[name])
    if state.get("config") is theirs:
        made.config = ours
    state.pop(GRAPHS, None)
    made._modules.pop(GRAPHS, None)
    for name, child in made._modules.items():
        if name == "core_attention":
            made._modules[name] = PagedCoreAttention(softmax_offset=_learned(child))
        elif child is not None:
            made._modules[name] = _copied(child, theirs, ours, done)
    _exchange_class(made)
    return made


def _learned(core_attention: Any) -> nn.Parameter | None:
    """The learned sinks of an attention."""
    found = getattr(core_attention, "softmax_offset", None)
    return found if isinstance(found, nn.Parameter) else None


def _exchange_class(module: Any) -> None:
    """Give a copied module the engine's class where there is one with the same parameters."""
    if type(module) is ColumnParallelLinear:
        module.__class__ = InferenceColumnParallelLinear
    elif type(module) is RowParallelLinear:
        module.__class__ = InferenceRowParallelLinear
    elif type(module).__name__ == "SelfAttention":
        module.__class__ = PagedSelfAttention
