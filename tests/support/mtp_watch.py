"""`MtpWatch`: every draft of an MTP layer is what the layer gives over the whole sequence at once.

A wrong draft changes no token, only how many come at once: a stale hidden state, a lost entry or
one of a block's former owner would never be seen in the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows, sample
from tests.support.draft_watch import DraftWatch
from tests.support.harness import greedy, make_engine
from tests.support.mtp_model import MtpModel


class WholeSequences:
    """Drafts from scratch: the trunk's hidden states by a serial engine of its own, in one chunk,
    and the layer in plain torch.

    Args:
        model: both are its.

    Attributes:
        draft_vocab_size: as in the settings of the engine whose drafts these must be.
    """

    draft_vocab_size: int | None = None

    def __init__(self, model: MtpModel) -> None:
        self._model = model
        self._engine = make_engine(model, lookahead=0, max_tokens=512, enable_prefix_caching=False)
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._drafted: dict[tuple[Any, ...], list[int]] = {}
        self._texts: list[list[int]] = []

    def close(self) -> None:
        """The engine's end."""
        self._engine.close()

    def expect(self, texts: list[list[int]]) -> None:
        """Prompts with their answers: one chunk of a whole text gives the hidden states of all its
        beginnings, none of which depends on what follows."""
        self._texts = texts

    def hidden(self, tokens: list[int]) -> Tensor:
        """The trunk's hidden states, `[tokens, hidden]`."""
        if tuple(tokens) not in self._known:
            begun = (text for text in self._texts if text[: len(tokens)] == tokens)
            whole = next(begun, tokens)
            self._engine.generate([whole], greedy(1))
            while self._engine.has_unfinished_requests():
                self._engine.step_modern()
            states = self._engine.context.gpu_view.hidden_states[: len(whole)].clone()
            for length in range(1, len(whole) + 1):
                self._known[tuple(whole[:length])] = states[:length]
        return self._known[tuple(tokens)]

    def drafts(self, tokens: list[int], count: int, slot: int, records: Tensor) -> list[int]:
        """The drafts that must follow `tokens`: computed once for each way to sample.

        Args:
            tokens: of the sequence, two at least.
            count: drafts.
            slot: whose record says how the request samples.
            records: of all slots.
        """
        asked = tuple(tokens), count, bytes(records[slot].numpy()), self.draft_vocab_size
        if asked not in self._drafted:
            self._drafted[asked] = self._draft(tokens, count, slot, records)
        return self._drafted[asked]

    def _draft(self, tokens: list[int], count: int, slot: int, records: Tensor) -> list[int]:
        layers, rotary = self._model.mtp.layers, self._engine.context.gpu_view.rotary
        hidden = self.hidden(tokens[:-1])
        cos, sin = rotary.cos.to(hidden.dtype), rotary.sin.to(hidden.dtype)
        known, found = list(tokens), list[int]()
        for number in range(count):
            depth = min(number + 1, len(layers))
            entries = slice(depth, len(known))
            embedded = self._model.embedding[torch.tensor(known[entries])]
            outputs = layers[depth - 1].one_shot(embedded, hidden, cos[entries], sin[entries])
            # The next depth takes the outputs; the last one takes what it took, and its last one.
            is_last = depth == len(layers)
            hidden = torch.cat((hidden, outputs[-1:])) if is_last else outputs
            logits = self._model.output_layer(outputs[-1:])[0][:, : self.draft_vocab_size]
            place = torch.tensor([len(known)], dtype=torch.int32)
            rows = SamplingRows(torch.tensor([slot]), place, records)
            found.append(int(sample.reference(logits, rows, SamplingMode.FILTERED)))
            known.append(found[-1])
        return found


class MtpWatch(DraftWatch):
    """Compares the drafts of every step that an engine books.

    Args:
        engine: with `speculative_method="mtp"`.
        whole: of the same model.

    Attributes:
        rows: that were compared.
    """

    def __init__(self, engine: DynamicInferenceEngine, whole: WholeSequences) -> None:
        super().__init__(engine)
        self._whole = whole
        whole.draft_vocab_size = engine.context.config.draft_vocab_size
        self._records = engine.context.gpu_view.slots.records
        self.rows = 0

    def look(self, step: int, slot: int, tokens: list[int], drafts: list[int]) -> None:
        count = min(self.count, int(self.slots.drafts[slot]), self.room(slot, tokens))
        if count < 1 or len(tokens) < 2:
            return
        wanted = self._whole.drafts(tokens, count, slot, self._records)
        assert drafts[:count] == wanted, (step, slot, tokens, drafts[:count], wanted)
        self.rows += 1
