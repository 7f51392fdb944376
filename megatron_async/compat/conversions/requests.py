"""`RequestBook`: Megatron's requests beside ours, from `add_request` to the report of their end.

Also how a request of ours becomes Megatron's, and text and tokens as Megatron's controller makes
them, with any tokenizer of its interface.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.inference import inference_request as megatron_requests
from megatron.core.inference.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord as Record
from megatron.core.inference.sampling_params import SamplingParams
from numpy.typing import NDArray

from megatron_async.compat.conversions.errors import to_overflow
from megatron_async.compat.conversions.events import TokenEvent, TokenTimes, to_epochs, to_events
from megatron_async.planning.request_slots import RequestSlots
from megatron_async.requests.inference_request import DynamicInferenceRequest as OwnRequest
from megatron_async.text.stop_words import cut_at_stop_word


def tokenize_prompt(tokenizer: Any, prompt: str, add_BOS: bool = False) -> list[int]:  # noqa: N803
    """Token ids of a prompt, with the beginning-of-sequence token or without.

    Megatron asks the caller, not the tokenizer: those that a tokenizer puts in front by itself are
    taken away, unless `add_BOS`, and then there is one.

    Raises:
        ValueError: no tokenizer, or `add_BOS` and it has no such token.
    """
    if tokenizer is None:
        raise ValueError(
            "a text prompt needs a tokenizer and this controller has none: give token ids, or a "
            "tokenizer to TextGenerationController."
        )
    bos = getattr(tokenizer, "bos", None)
    if add_BOS and bos is None:
        raise ValueError(
            "add_BOS=True, but the tokenizer has no beginning-of-sequence token: leave add_BOS "
            "False."
        )
    tokens = list(tokenizer.tokenize(prompt))
    start = 0
    while bos is not None and start < len(tokens) and tokens[start] == bos:
        start += 1
    return ([bos] if add_BOS else []) + tokens[start:]


def detokenize(
    tokenizer: Any,
    tokens: Sequence[int],
    remove_EOD: bool = True,  # noqa: N803
    skip_special_tokens: bool = True,
) -> str:
    """Text of token ids; `remove_EOD`: without the end-of-document tokens at their end. Tokenizers
    that take `skip_special_tokens` are told."""
    ids, end = list(tokens), getattr(tokenizer, "eod", None)
    while remove_EOD and end is not None and ids and ids[-1] == end:
        ids.pop()
    parameters = inspect.signature(tokenizer.detokenize).parameters
    options = {}
    if "skip_special_tokens" in parameters:
        options["skip_special_tokens"] = skip_special_tokens
    text: str = tokenizer.detokenize(ids, **options)
    return text


def tokens_before_stop_word(
    tokenizer: Any, tokens: Sequence[int], words: Sequence[str], counts_from: int
) -> int:
    """How many of the generated tokens, the last of which completes a stop word, lie wholly before
    it."""
    text = tokenizer.detokenize(list(tokens))
    length = len(cut_at_stop_word(text, words, False, counts_from))
    kept = len(tokens) - 1
    while kept > 0 and len(tokenizer.detokenize(list(tokens[:kept]))) > length:
        kept -= 1
    return max(kept, 0)


class RoutedRequest(DynamicInferenceRequest):
    """Megatron's request. Its `routing_indices`, int32 `[tokens - 1, layers with experts, topk]`,
    are on their way to the host when it ends: the first look waits for them, not the engine."""

    own: OwnRequest | None = None
    """The request whose record is still to be taken."""

    @property
    def routing_indices(self) -> NDArray[np.int32] | None:
        """Megatron's field; None without `moe_enable_routing_replay`."""
        if self.own is not None:
            found = self.own.routing_indices
            del self.own
            if found is not None:
                # Tokens before a stop word are fewer than those that were computed.
                kept = self.prompt_length + len(self.generated_tokens) - 1
                self.routing_indices = found[:kept].astype(np.int32)
        return self.__dict__.get("routing_indices")

    @routing_indices.setter
    def routing_indices(self, found: NDArray[np.int32] | None) -> None:
        self.__dict__["routing_indices"] = found  # where Megatron's `serialize` looks

    def serialize(self) -> dict[str, Any]:
        """Megatron's form for the wire, with the record."""
        self.routing_indices = self.routing_indices  # takes it
        return dict(super().serialize())


def describe(
    answer: DynamicInferenceRequest, own: OwnRequest, tokens: list[int], *, with_pauses: bool
) -> None:
    """Put into Megatron's request what is known of ours, which goes on, with the tokens so far."""
    set_prompt(answer, own)
    answer.status = Status[own.status.name]
    answer.generated_tokens = tokens
    answer.generated_length = len(tokens)
    answer.ttft = own.ttft
    answer.num_cached_tokens = own.num_cached_tokens or 0
    answer.events = to_events(own.events, with_pauses=with_pauses)
    answer.event_add_engine = answer.events[0]


def set_prompt(answer: DynamicInferenceRequest, own: OwnRequest) -> None:
    """The prompt's tokens, int64 `[prompt length]`, host memory; once."""
    if answer.prompt_length != len(own.prompt_tokens):
        answer.prompt_tokens = torch.from_numpy(own.prompt_tokens.astype("int64"))
        answer.remaining_prompt_tokens = answer.prompt_tokens
        answer.prompt_length = len(own.prompt_tokens)


def complete(
    answer: DynamicInferenceRequest,
    own: OwnRequest,
    tokenizer: Any,
    token_events: list[TokenEvent],
    *,
    with_pauses: bool,
) -> None:
    """Put into `answer` all that is known of a request that has ended, and raise what the tokenizer
    raises. Python runs for each token where alternatives or segments were asked for, once."""
    describe(answer, own, list(own.generated_tokens), with_pauses=with_pauses)
    error = to_overflow(own.request_id, own.error) if own.failed() else None
    answer.events = to_events(own.events, token_events, error, with_pauses=with_pauses)
    answer.latency = own.latency
    if isinstance(answer, RoutedRequest) and own.routing is not None:
        answer.own = own
    kept = len(own.generated_tokens)
    if tokenizer is not None:
        kept = _set_texts(answer, own, tokenizer)
    if own.ttft is not None and own.latency is not None and kept > 1:
        answer.tpot = [(own.latency - own.ttft) / (len(own.generated_tokens) - 1)]
    _set_log_probs(answer, own, kept)


def _set_texts(answer: DynamicInferenceRequest, own: OwnRequest, tokenizer: Any) -> int:
    """Set texts as Megatron makes them. Gives the number of generated tokens that Megatron keeps:
    they end before a stop word."""
    tokens, params = own.generated_tokens, own.sampling_params
    keeps_stop = params.detokenize_stop_sequence
    if answer.prompt is None:
        answer.prompt = detokenize(tokenizer, own.prompt_tokens.tolist(), remove_EOD=False)
    if own.finish_reason == "stop_word":
        # Words are matched on text: one may begin inside of a token.
        answer.generated_text = own.generated_text
        if not keeps_stop:
            words = params.stop_words or []
            kept = tokens_before_stop_word(tokenizer, tokens, words, own.stop_words_from)
            answer.generated_tokens = tokens = tokens[:kept]
            answer.generated_length = kept
    else:
        answer.generated_text = detokenize(tokenizer, tokens, remove_EOD=not keeps_stop)
        if params.echo:
            answer.generated_text = answer.prompt + answer.generated_text
    if answer.sampling_params is not None and answer.sampling_params.return_segments:
        answer.generated_segments = [tokenizer.detokenize([token]) for token in tokens]
        prompt = own.prompt_tokens.tolist()
        answer.segments = [tokenizer.detokenize([token]) for token in prompt]
        answer.segments += answer.generated_segments
    return len(tokens)


def _set_log_probs(answer: DynamicInferenceRequest, own: OwnRequest, kept: int) -> None:
    """Lists as Megatron has them: empty ones for the prompt where it was left out."""
    if own.log_probs is None:
        return
    answer.generated_log_probs = (own.generated_log_probs or [])[:kept]
    answer.prompt_log_probs = own.prompt_log_probs or []
    if own.sampling_params.top_n_logprobs:
        answer.generated_top_n_logprobs = (own.generated_top_n_logprobs or [])[:kept]
        answer.prompt_top_n_logprobs = own.prompt_top_n_logprobs or []


@dataclass
class FinishedRequestRecord:
    """Main's class, where the installed Megatron lacks it."""

    policy_epoch: list[tuple[int, int]] | None
    kv_cache_epoch: list[tuple[int, int]] | None
    num_evictions: int


def finished_record(request: DynamicInferenceRequest) -> Any:
    """The weights that a request has seen, and how often it was evicted."""
    kind = getattr(megatron_requests, "FinishedRequestRecord", FinishedRequestRecord)
    evict = DynamicInferenceEventType.EVICT
    evictions = sum(event.type is evict for event in request.events)
    return kind(request.policy_epoch, request.kv_cache_epoch, evictions)


@dataclass
class RequestEntry:
    """One request in both forms; until it is added, it has neither a future nor our form.

    Attributes:
        record: Megatron's record, of one request: an eviction splits nothing here.
        future, own_future: of the record, and of our request at its end.
        since: `TokenTimes.number` at its arrival.
        has_ended: whether the record is complete.
    """

    record: Record
    future: asyncio.Future[Record] | None = None
    own: OwnRequest | None = None
    own_future: asyncio.Future[OwnRequest] | None = None
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
        self.finished = 0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def ids(self) -> list[int]:
        """Ids of the unfinished requests, first come first."""
        return list(self._entries)

    def begin(self, request_id: int, prompt: str | None, params: SamplingParams) -> RequestEntry:
        """The entry of a request that is about to be added."""
        request = RoutedRequest(request_id=request_id, prompt=prompt, sampling_params=params)
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

    def _tokens(self, own: OwnRequest) -> list[int]:
        slot = self._slots.slot_of.get(own.request_id)
        return list(own.generated_tokens) if slot is None else self._slots.generated_tokens(slot)

    def _set_epochs(self, entry: RequestEntry, own: OwnRequest) -> None:
        entry.request.policy_epoch, entry.request.kv_cache_epoch = to_epochs(own)


def deliver(future: asyncio.Future[Record], record: Record) -> None:
    """Give a record to its waiter, if that still waits."""
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(record)
