"""What the model itself says of texts: hidden states, computed by the engine's own prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_async import LLM, SamplingParams
from megatron_async.engine.listener import EngineListener
from megatron_async.planning.step_plan import StepPlan
from megatron_async.step.text_generation_controller import LaunchedStep


class HiddenStates(EngineListener):
    """Takes the hidden states of prompts while an engine prefills them.

    Args:
        llm: made with lookahead 0, without prefix caching and captured graphs.

    Attributes:
        found: of the present texts, by request id: `[tokens, hidden]`, the model's dtype, host.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self._context = llm, llm.engine.context
        self._ids: list[int] = []
        self.found: dict[int, Tensor] = {}
        llm.engine.listeners.append(self)

    def of(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Hidden states after the last norm, `[tokens, hidden]` of each text, on the host."""
        self.found = {}
        self._llm.generate(
            [list(text) for text in texts],
            SamplingParams(num_tokens_to_generate=1, temperature=0.0, termination_id=-1),
        )
        return [self.found[number] for number in sorted(self.found)]

    def launched(self, plan: StepPlan | None) -> None:
        """Note the chunks' requests: one that ends with the step has left its slot when the step is
        booked."""
        if plan is not None:
            chunks = plan.slots[plan.num_decode :]
            self._ids = self._context.slots.request_id[chunks].tolist()

    def resolved(self, step: LaunchedStep) -> None:
        """Copy what the step's chunks have."""
        plan, view = step.plan, self._context.gpu_view
        states: Any = view.hidden_states
        starts, first = plan.prefill_starts, plan.first_prefill_token
        for chunk, request in enumerate(self._ids):
            rows = states[first + int(starts[chunk]) : first + int(starts[chunk + 1])].cpu()
            before = self.found.get(request)
            self.found[request] = rows if before is None else torch.cat((before, rows))


class StateStore:
    """Hidden states of texts, computed when they are first asked for, and kept while they fit.

    Args:
        trunk: computes them.
        texts: token ids of each.
        device: where they are wanted, and kept.
        most_bytes: of what is kept; what comes later is computed each time.
    """

    def __init__(
        self,
        trunk: HiddenStates,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        most_bytes: int,
    ) -> None:
        self._trunk, self._texts, self._device = trunk, texts, device
        self._room = most_bytes
        self._kept: dict[int, Tensor] = {}

    def of(self, numbers: Sequence[int]) -> list[Tensor]:
        """`[tokens, hidden]` of each of these texts, on the device."""
        missing = [number for number in numbers if number not in self._kept]
        new: dict[int, Tensor] = {}
        if missing:
            states = self._trunk.of([self._texts[number] for number in missing])
            for number, state in zip(missing, states, strict=True):
                new[number] = state.to(self._device)
                if state.nbytes <= self._room:
                    self._room -= state.nbytes
                    self._kept[number] = new[number]
        return [self._kept[n] if n in self._kept else new[n] for n in numbers]
