"""`MtpWatch`: every draft of an MTP layer is what the layer gives over the whole sequence at once.

A wrong draft changes no token, only how many come at once: a stale hidden state, a lost entry or
one of a block's former owner would never be seen in the output.
"""

from __future__ import annotations

import numpy as np
import torch
from harness import greedy, make_engine
from mtp_model import MtpModel
from torch import Tensor

from megatron_async import DynamicInferenceEngine
from megatron_async.engines.listener import EngineListener
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows, sample_reference
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


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

    def close(self) -> None:
        """The engine's end."""
        self._engine.close()

    def hidden(self, tokens: list[int]) -> Tensor:
        """The trunk's hidden states, `[tokens, hidden]`."""
        key = tuple(tokens)
        if key not in self._known:
            self._engine.generate([tokens], greedy(1))
            while self._engine.has_unfinished_requests():
                self._engine.step_modern()
            self._known[key] = self._engine.context.gpu_view.hidden_states[: len(tokens)].clone()
        return self._known[key]

    def drafts(self, tokens: list[int], count: int, slot: int, records: Tensor) -> list[int]:
        """What must be drafted behind `tokens`.

        Args:
            tokens: of the sequence, two at least.
            count: drafts.
            slot: whose record says how the request samples.
            records: of all slots.
        """
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
            found.append(int(sample_reference(logits, rows, SamplingMode.FILTERED)))
            known.append(found[-1])
        return found


class MtpWatch(EngineListener):
    """Looks at the drafts of every step that an engine books.

    Args:
        engine: with `speculative_method="mtp"`.
        whole: of the same model.

    Attributes:
        rows: that were compared.
    """

    def __init__(self, engine: DynamicInferenceEngine, whole: WholeSequences) -> None:
        self._slots, self._whole = engine.context.slots, whole
        whole.draft_vocab_size = engine.context.config.draft_vocab_size
        self._records = engine.context.gpu_view.slots.records
        self._count = engine.context.config.num_speculative_tokens
        self.rows = 0
        engine.listeners.append(self)

    def resolved(self, step: LaunchedStep) -> None:
        plan, slots = step.plan, self._slots
        if step.error is not None:
            return
        live = (slots.generation[plan.slots] == plan.generations) & plan.produces
        for row in np.flatnonzero(live):
            slot = int(plan.slots[row])
            tokens = slots.tokens[slot, : slots.num_known[slot]].tolist()
            # Behind the last place that a request may fill nothing is drafted that could be fed.
            room = int(slots.max_length[slot]) - 1 - len(tokens)
            count = min(self._count, int(slots.drafts[slot]), room)
            if count < 1 or len(tokens) < 2:
                continue
            wanted = self._whole.drafts(tokens, count, slot, self._records)
            reported = step.drafts[row].tolist()[:count]
            assert reported == wanted, (plan.step, slot, tokens, reported, wanted)
            self.rows += 1
