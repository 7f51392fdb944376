"""`RequestBook`: Megatron's requests beside ours, from `add_request` to the report of their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord as Record
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.conversions.answers import complete, describe, set_prompt
from megatron_async.compat.conversions.errors import to_overflow
from megatron_async.compat.conversions.events import EpochStamps, TokenTimes
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.requests.inference_request import DynamicInferenceRequest as OwnRequest


@dataclass
class RequestEntry:
    """One request in both forms.

    Attributes:
        record: Megatron's record, of one request: an eviction splits nothing here.
        future: of the record; None while the request is being added.
        own: our request; None likewise.
        own_future: of our request at its end; None likewise.
        stamps: epochs.
        since: `TokenTimes.number` at its arrival.
        has_ended: whether the record is complete.
    """

    record: Record
    future: asyncio.Future[Record] | None = None
    own: OwnRequest | None = None
    own_future: asyncio.Future[OwnRequest] | None = None
    stamps: EpochStamps = field(default_factory=EpochStamps)
    since: int = 0
    has_ended: bool = False

    @property
    def request(self) -> DynamicInferenceRequest:
        """Megatron's request."""
        return self.record.requests[0]


class RequestBook:
    """What Megatron's side knows of requests. It leads to no engine, so that an engine's memory
    goes with the last reference to it.

    Args:
        tokenizer: of the controller, or None.
        slots: the books of live requests.
        with_pauses: `InferenceConfig.track_paused_request_events`.
        times: reports of tokens; None: they are not tracked.

    Attributes:
        epoch: present generation of weights; None until one is told.
        finished: requests that have ended, failed ones not counted.
    """

    def __init__(
        self, tokenizer: Any, slots: RequestSlots, with_pauses: bool, times: TokenTimes | None
    ) -> None:
        self._tokenizer = tokenizer
        self._slots = slots
        self._with_pauses = with_pauses
        self._times = times
        self._entries: dict[int, RequestEntry] = {}
        """In the order of their arrival."""
        self._ended: list[Record] = []
        self.epoch: int | None = None
        self.finished = 0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def ids(self) -> list[int]:
        """Ids of the unfinished requests, first come first."""
        return list(self._entries)

    def begin(self, request_id: int, prompt: str | None, params: SamplingParams) -> RequestEntry:
        """The entry of a request that is about to be added."""
        request = DynamicInferenceRequest(
            request_id=request_id, prompt=prompt, sampling_params=params
        )
        entry = RequestEntry(Record.from_request(request))
        if self._times is not None:
            entry.since = self._times.number
        self._entries[request_id] = entry
        return entry

    def drop(self, request_id: int) -> None:
        """A request was not added after all."""
        self._entries.pop(request_id, None)

    def added(self, entry: RequestEntry, own: OwnRequest) -> None:
        """A request was added, and goes on."""
        entry.own = own
        set_prompt(entry.request, own)
        if self.epoch is not None:
            entry.stamps.stamp(time.time(), len(own.prompt_tokens), self.epoch)

    def live(self, request_id: int) -> DynamicInferenceRequest:
        """An unfinished request as it stands (KeyError if there is none): always the same object,
        brought up to date."""
        entry = self._entries[request_id]
        assert entry.own is not None, "added requests have both forms"
        tokens = self._tokens(entry.own)
        describe(entry.request, entry.own, tokens, with_pauses=self._with_pauses)
        self._set_epochs(entry, entry.own)
        return entry.request

    def ended(self, own: OwnRequest) -> None:
        """A request has ended: complete its record, and tell its waiter. What the tokenizer
        raises meanwhile is this request's error alone."""
        entry = self._entries.pop(own.request_id)
        entry.has_ended, request = True, entry.request
        events = []
        if self._times is not None:
            events = self._times.events_of(own.request_id, own.generated_tokens, entry.since)
            first = next(iter(self._entries.values()), None)
            self._times.forget_before(self._times.number if first is None else first.since)
        try:
            complete(request, own, self._tokenizer, events, with_pauses=self._with_pauses)
        except Exception as error:
            request.status = Status.FAILED
            request.add_event_error_nontransient(to_overflow(own.request_id, error))
        if own.failed() and request.generated_text is None:
            request.generated_text = ""
        if request.prompt_tokens is None:
            request.prompt_tokens = torch.empty(0, dtype=torch.int64)
        self._set_epochs(entry, own)
        entry.record.latency = own.latency
        self.finished += request.status is Status.COMPLETED
        self._ended.append(entry.record)
        if entry.future is not None:
            deliver(entry.future, entry.record)

    def take_ended(self) -> list[Record]:
        """Records of the requests that ended since the last call, in that order."""
        ended, self._ended = self._ended, []
        return ended

    def give_back(self, ended: list[Record]) -> None:
        """The next `take_ended` returns these, which the last one has returned, too."""
        self._ended[:0] = ended

    def forget(self, request_ids: Collection[int]) -> None:
        """`take_ended` shall not return these, if they have ended."""
        self._ended = [each for each in self._ended if each.request_id not in request_ids]

    def begin_epoch(self, epoch: int) -> None:
        """The weights are new: stamp every unfinished request."""
        self.epoch, now = epoch, time.time()
        for entry in self._entries.values():
            if (own := entry.own) is not None:
                total = len(own.prompt_tokens) + len(self._tokens(own))
                entry.stamps.stamp(now, total, epoch)

    def _tokens(self, own: OwnRequest) -> list[int]:
        slot = self._slots.slot_of.get(own.request_id)
        return list(own.generated_tokens) if slot is None else self._slots.generated_tokens(slot)

    def _set_epochs(self, entry: RequestEntry, own: OwnRequest) -> None:
        entry.request.policy_epoch = entry.stamps.policy()
        entry.request.kv_cache_epoch = entry.stamps.kv_cache(own)


def deliver(future: asyncio.Future[Record], record: Record) -> None:
    """Give a record to its waiter, if that still waits."""
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(record)
