"""Watches on an engine's drafts.

A wrong draft changes no token, only how many come at once. A stale or foreign token or hidden
state, a lost entry or one of a block's former owner would never be seen in the output.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine
from megatron_async.engine.listener import EngineListener
from megatron_async.ops.drafting.ngram_lookup import LONGEST, SEARCHED, SHORTEST
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows, sample
from megatron_async.step.text_generation_controller import LaunchedStep
from tests.support.harness import drain, greedy, kept, make_engine
from tests.support.mtp_model import MtpModel


class DraftWatch(EngineListener):
    """Calls `look` for the rows of every booked step that yielded a token of their request."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.slots = engine.context.slots
        self.count = engine.context.config.num_speculative_tokens
        engine.listeners.append(self)

    def resolved(self, step: LaunchedStep) -> None:
        plan, slots = step.plan, self.slots
        if step.error is not None:
            return
        live = (slots.generation[plan.slots] == plan.generations) & plan.produces
        for row in np.flatnonzero(live).tolist():
            slot = int(plan.slots[row])
            tokens = slots.tokens[slot, : slots.num_known[slot]].tolist()
            self.look(plan.step, slot, tokens, step.drafts[row].tolist())

    def room(self, slot: int, tokens: list[int]) -> int:
        """Drafts that could be fed: none stands after the last place that a request may fill."""
        return int(self.slots.max_length[slot]) - 1 - len(tokens)

    def look(self, step: int, slot: int, tokens: list[int], drafts: list[int]) -> None:
        """Take one row: all tokens of its sequence, with the step's, and the drafts for the next
        step, -1 from where on there is none."""
        raise NotImplementedError


class DraftRecorder(DraftWatch):
    """Keeps all drafts, by the tokens of the sequence."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        super().__init__(engine)
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def look(self, step: int, slot: int, tokens: list[int], drafts: list[int]) -> None:
        if (room := self.room(slot, tokens)) > 0:
            self.drafts[tuple(tokens)] = drafts[:room]


def wanted_drafts(tokens: list[int], count: int, searched: int = SEARCHED) -> list[int]:
    """The drafts that must follow `tokens`: what followed the longest match of the last ones,
    of equal ones the latest; `count` tokens, all -1 where there is none."""
    known = tokens[max(len(tokens) - 1 - searched, 0) :]
    for length in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(known) - length - 1, -1, -1):
            if known[start : start + length] == known[-length:]:
                text, place = list(known), start + length
                for draft in range(count):
                    text.append(text[place + draft])
                return text[len(known) :]
    return [-1] * count


class NgramWatch(DraftWatch):
    """Every draft of the n-gram drafter is what a search in Python finds, step by step; `found`
    counts rows that had drafts."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        super().__init__(engine)
        self.found = 0

    def look(self, step: int, slot: int, tokens: list[int], drafts: list[int]) -> None:
        allowed = int(self.slots.drafts[slot])
        wanted = wanted_drafts(tokens, self.count)[:allowed] + [-1] * (self.count - allowed)
        assert drafts == wanted, (step, slot, tokens, drafts, wanted)
        self.found += wanted[:1] > [-1]


class WholeSequences:
    """Drafts from scratch: the trunk's hidden states by a serial engine of its own, in one chunk,
    and the layer in plain torch. `draft_vocab_size` of the engine whose drafts these must be."""

    draft_vocab_size: int | None = None

    def __init__(self, model: MtpModel) -> None:
        self._model = model
        settings = {"max_tokens": 512, "enable_prefix_caching": False}
        self._engine = kept(make_engine(model, lookahead=0, **settings))
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
            drain(self._engine)
            states = self._engine.context.gpu_view.hidden_states[: len(whole)].clone()
            for length in range(1, len(whole) + 1):
                self._known[tuple(whole[:length])] = states[:length]
        return self._known[tuple(tokens)]

    def drafts(self, tokens: list[int], count: int, slot: int, records: Tensor) -> list[int]:
        """The `count` drafts that must follow `tokens` (two at least): computed once for each way
        to sample, which the record of `slot` says."""
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
            found.append(int(sample.reference(logits, rows, SamplingMode.FILTERED)[0]))
            known.append(found[-1])
        return found


class MtpWatch(DraftWatch):
    """Every draft of an MTP layer is what the layer gives over the whole sequence at once; `rows`
    counts what was compared."""

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
