"""`SharedPrompts`: requests share the blocks of equal beginnings of their prompts, so that first
chunks begin behind tokens that are in the cache already."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from attention_model import VOCABULARY
from harness import Job
from schedules import Schedule, random_schedule

from megatron_async import DynamicInferenceEngine
from megatron_async.contexts.admission import WaitingRequest
from megatron_async.contexts.request_slots import NO_SLOTS, SlotState
from megatron_async.contexts.step_plan import IntArray
from megatron_async.ops.sampling.slot_records import Header, RowFeature


class SharedPrompts:
    """A prefix cache of the simplest kind, for tests: a dictionary by all tokens before a block's
    end.

    A request finds nothing whose prompt tokens must pass through its own steps: those whose log
    probs are wanted, and, where the engine keeps no tokens beside the keys, those that repetition
    penalties look at.

    Args:
        engine: an idle one.
        remembers: keep blocks without an owner; else those of requests that hold a slot are found.
        answers: share generated tokens too, which an evicted request finds again; else prompts
            alone. Only where the engine keeps tokens.

    Attributes:
        hits: blocks that were shared.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, remembers: bool = False, answers: bool = False
    ) -> None:
        context = engine.context
        self._slots, self._blocks = context.slots, context.blocks
        self._size = context.block_size_tokens
        self._remembers, self._answers = remembers, answers
        self._keeps_tokens = context.keeps_tokens
        assert self._keeps_tokens or not answers
        self._block_of: dict[tuple[int, ...], int] = {}
        self.hits = 0
        context.scheduler.cached_blocks = self.cached_blocks  # type: ignore[method-assign]
        self._share = context.blocks.share
        context.blocks.share = self.share  # type: ignore[method-assign]

    def share(self, blocks: IntArray) -> None:
        """`KVBlockAllocator.share`, counted."""
        self.hits += len(blocks)
        self._share(blocks)

    def cached_blocks(self, waiting: WaitingRequest) -> IntArray:
        """See `Scheduler.cached_blocks`."""
        request, size = waiting.request, self._size
        record, params = request.record, request.sampling_params
        assert record is not None
        repetition = float(record.words.view(np.float32)[Header.REPETITION])
        looks_back = record.words[Header.FEATURES] & RowFeature.PENALTIES and repetition != 1.0
        if looks_back and not self._keeps_tokens:
            return NO_SLOTS
        if params.return_log_probs and not params.skip_prompt_log_probs:
            return NO_SLOTS
        self.learn()
        tokens, found = tuple(map(int, request.prompt_tokens)), []
        if self._answers:
            tokens += tuple(map(int, request.generated_tokens))
        for end in range(size, min(len(tokens), waiting.num_known - 1) + 1, size):
            if tokens[:end] not in self._block_of:
                break
            found.append(self._block_of[tokens[:end]])
        return np.array(found, dtype=np.int32)

    def forget_all(self) -> None:
        """What the cache held is lost."""
        self.learn()
        if self._remembers:
            self._blocks.forget(np.array(list(self._block_of.values()), dtype=np.int32))
        self._block_of.clear()

    def learn(self) -> None:
        """Take notice of the blocks whose contents earlier plans have written, or will before the
        step that is planned."""
        slots, blocks, size = self._slots, self._blocks, self._size
        lost, blocks.forgotten = set(blocks.forgotten), []
        if not self._remembers:
            self._block_of.clear()
        self._block_of = {key: b for key, b in self._block_of.items() if b not in lost}
        for slot in np.flatnonzero(slots.state != SlotState.FREE):
            begins = slots.state[slot] == SlotState.PREFILLING
            # Of the generated tokens the last may not have been fed yet.
            fed = max(slots.num_known[slot] - 1, slots.prompt_length[slot])
            written = slots.num_prefilled[slot] if begins else fed
            if not self._answers:
                written = min(written, slots.prompt_length[slot])
            tokens = tuple(slots.tokens[slot, :written].tolist())
            for end in range(size, int(written) + 1, size):
                block = int(slots.block_table[slot, end // size - 1])
                if tokens[:end] in self._block_of:
                    continue
                self._block_of[tokens[:end]] = block
                if self._remembers:
                    blocks.remember(np.array([block], dtype=np.int32))


def sharing_schedule(seed: int, width: int, looks_back: bool = False) -> Schedule:
    """A random schedule of prompts that begin alike, in a pool as small as ever; with repetition
    penalties, if `looks_back`."""
    schedule, chooser = random_schedule(seed), random.Random(seed)
    texts = [[chooser.randrange(VOCABULARY) for _ in range(30)] for _ in range(2)]
    jobs = []
    for number, job in enumerate(schedule.jobs):
        length = len(job.prompt)
        same = min(length, chooser.choice([length, length - 1, length // 2]))
        prompt = chooser.choice(texts)[:same] + [token % VOCABULARY for token in job.prompt[same:]]
        jobs.append(Job(prompt, replace(job.params, seed=number)))
        params = jobs[-1].params
        params.termination_id = min(params.termination_id, VOCABULARY - 1)
        params.stop_token_ids = [token % VOCABULARY for token in params.stop_token_ids]
        if chooser.random() < 0.5:
            params.frequency_penalty = 0.9
        if looks_back and number % 3 == 0:
            params.repetition_penalty = 1.7
    schedule.jobs = jobs
    schedule.config["max_tokens"] += schedule.config["max_requests"] * (width - 1)
    return schedule
