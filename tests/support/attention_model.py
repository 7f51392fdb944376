"""The smallest model that an engine serves: embedding, one layer of attention, output layer.

It is a module of the fuzzer, for speed: all that it does not have (norms, MLPs, Megatron's modules
around them) keeps no state between steps. What does, the paged cache with rotary embedding and
attention, is the engine's own. It computes in float64, so that a sum taken in another order (as in
a batch of another size) never changes a token, however many are compared.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.device_state.gpu_view import ContextGPUView
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.hybrid import ModelConfig, transformer_config
from megatron_async.ops.experts.expert_routing import Routing

HIDDEN, HEADS, GROUPS, DIM, VOCABULARY = 16, 2, 1, 8, 48
ARCHITECTURE = ModelArchitecture("llama", 1, HIDDEN, HEADS, GROUPS, DIM, HIDDEN, VOCABULARY)


class OnlyAttention(PagedSelfAttention):
    """Projections around the engine's attention."""

    def __init__(self, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        # Large weights, so that each token depends on the whole sequence before it.
        self.query_key_value = weights((HEADS + 2 * GROUPS) * DIM, HIDDEN, 4.0, generator)
        self.output = weights(HIDDEN, HEADS * DIM, 4.0, generator)

    def forward(self, hidden: Tensor, view: ContextGPUView) -> Tensor:
        """`[tokens, hidden]` -> the same."""
        attended = view.attention(self.kv_layer_index, hidden @ self.query_key_value.T, None, None)
        return attended.flatten(1) @ self.output.T


class OutputLayer(nn.Module):
    """Hidden states to logits, called as Megatron's."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.head = weights(VOCABULARY, HIDDEN, 2.0, generator)

    @property
    def weight(self) -> Tensor:
        """Under Megatron's name."""
        return self.head

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`[.., hidden]` -> `[.., vocabulary]`, and no bias."""
        return hidden @ self.head.T, None


class AttentionModel(nn.Module):
    """What `GPTInferenceWrapper` wants of a model; `seed` makes its random weights."""

    share_embeddings_and_output_weights = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = with_experts(transformer_config(ARCHITECTURE, torch.float64))
        self.vocab_size = VOCABULARY
        self.embedding = weights(VOCABULARY, HIDDEN, 4.0, generator)
        self.attention = OnlyAttention(generator)
        self.output_layer = OutputLayer(generator)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        inference_context: ContextGPUView,
        runtime_gather_output: bool,
    ) -> Tensor:
        """Logits `[1, rows, vocabulary]` of a step, from ids and positions `[1, tokens]`."""
        hidden = self.layers(self.embedding[token_ids[0]], inference_context)
        if inference_context.routing is not None:
            inference_context.routing.note(choose_experts(hidden))
        rows = inference_context.last_token_logits(hidden[None])
        return self.output_layer(rows[None])[0]

    def layers(self, hidden: Tensor, view: ContextGPUView) -> Tensor:
        """`[tokens, hidden]` -> the same."""
        return hidden + self.attention(hidden, view)


def with_experts(config: ModelConfig) -> ModelConfig:
    """Say of a model that it has a layer with experts, behind the others: it changes nothing, but
    can be recorded."""
    config.hybrid_layer_pattern = f"{config.hybrid_layer_pattern}E"
    config.num_moe_experts, config.moe_router_topk = HIDDEN, 3
    return config


def choose_experts(hidden: Tensor) -> Routing:
    """Where `[tokens, hidden]` go: by all tokens before them, too."""
    chosen = hidden.topk(3, dim=1)
    return Routing(chosen.indices.int(), chosen.values.float())


def weights(rows: int, columns: int, scale: float, generator: torch.Generator) -> nn.Parameter:
    """Random ones of a product, float64 `[rows, columns]`."""
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return nn.Parameter(values * scale / columns**0.5, requires_grad=False)
