"""The smallest models with a layer for multi-token prediction, and what that layer must draft.

`MtpModel` is `AttentionModel` with such a layer (projection of embedding and hidden state,
attention, output). Its text is drawn to a cycle, and so are its drafts, so that they agree often;
each depends on all entries before it all the same.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_async.ops.attention.rope_append import apply_rotary_reference
from tests.support.attention_model import DIM, GROUPS, HEADS, HIDDEN, OnlyAttention, weights
from tests.support.cycling_model import PERIOD, CyclingHybridModel, CyclingModel

MTP_STRENGTH = 150.0
"""Added to the logit of the token that goes on with the cycle, of drafts."""


class EmbeddingTable(nn.Module):
    """Called as Megatron's embedding, or indexed."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]

    def forward(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """`[1, tokens]` -> `[tokens, 1, hidden]`."""
        return self.weight[input_ids[0]][:, None]


class MtpLayer(nn.Module):
    """`[tokens, 1, hidden]` embeddings and `[tokens, hidden]` hidden states -> `[tokens, 1,
    hidden]`. By `embedding`, `[vocabulary, hidden]`, a token is known again; `head` is the
    output layer's."""

    def __init__(self, generator: torch.Generator, embedding: Tensor, head: Tensor) -> None:
        super().__init__()
        self.join = weights(HIDDEN, 2 * HIDDEN, 1.5, generator)
        self.attention = OnlyAttention(generator)
        self._embedding, self._head = embedding, head

    def forward(self, embedded: Tensor, hidden: Tensor, view: Any) -> Tensor:
        entries = self.entries(embedded[:, 0], hidden)
        return self.behind(embedded[:, 0], entries, self.attention(entries, view))[:, None]

    def entries(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What attention takes; bounded, as norms would make it."""
        return torch.cat((embedded, hidden.tanh()), dim=1) @ self.join.T

    def behind(self, embedded: Tensor, entries: Tensor, attended: Tensor) -> Tensor:
        """The layer's output: of entries and attention, drawn to the cycle."""
        token = torch.cdist(embedded, self._embedding).argmin(dim=1)
        towards = self._head[(5 * token + 1) % PERIOD]
        pull = MTP_STRENGTH * towards / towards.square().sum(dim=1, keepdim=True)
        return entries + attended + pull

    def one_shot(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The outputs `[entries, hidden]` over a whole sequence of entries; `cos` and `sin` are
        `[entries, rotated]`, of their positions."""
        entries, count = self.entries(embedded, hidden), len(hidden)
        mixed = entries @ self.attention.query_key_value.T
        by_head = mixed.view(count, HEADS + 2 * GROUPS, DIM)
        query, key, value = by_head.split((HEADS, GROUPS, GROUPS), dim=1)
        query, key = apply_rotary_reference(query, key, cos[:, None], sin[:, None])
        scores = torch.einsum("qhd,tgd->hqt", query, key) * DIM**-0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(dim=2)
        attended = torch.einsum("hqt,tgd->qhd", shares, value)
        output = attended.flatten(1) @ self.attention.output.T
        return self.behind(embedded, entries, output)


class MtpModel(CyclingModel):
    """With attention alone, and its layers for multi-token prediction."""

    depths = 1

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        table, head = self.embedding, self.output_layer.head
        del self.embedding
        self.embedding = EmbeddingTable(table)  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(seed + 10)
        self.mtp = nn.Module()
        self.mtp.layers = nn.ModuleList(
            MtpLayer(generator, table, head) for _ in range(self.depths)
        )
        self.config.mtp_pattern, self.config.mtp_num_depths = "*", self.depths


class MtpHybridModel(MtpModel, CyclingHybridModel):
    """With recurrent layers in the trunk."""


class MtpDeepModel(MtpModel):
    """With three depths."""

    depths = 3


MTP_MODELS = {kind.__name__: kind for kind in (MtpModel, MtpHybridModel, MtpDeepModel)}
