"""A request, from the caller's prompt to the finished answer, and the events of its life."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.requests.log_probs import RequestLogProbs
from megatron_async.requests.routing_record import RoutingRecord, Rows
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.weight_versions import Span, WeightMarks, spans
from megatron_async.text.stop_words import cut_at_stop_word

if TYPE_CHECKING:
    from megatron_async.requests.sampling_record import SamplingRecord


class Status(Enum):
    """State of a request; Megatron-Core's names and values."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    """Paused: it holds its slot and blocks, and waits for a block."""
    COMPLETED = 4
    FAILED = 5


class DynamicInferenceEventType(Enum):
    """What can happen to a request."""

    ADD_ENGINE = auto()
    ADD_CONTEXT = auto()
    """The request got a slot; happens again after each eviction."""
    PAUSE = auto()
    EVICT = auto()
    FINISH = auto()
    FAIL = auto()


@dataclass(frozen=True)
class DynamicInferenceEvent:
    """One event; `timestamp` is `time.time()` in seconds."""

    type: DynamicInferenceEventType
    timestamp: float


@dataclass(kw_only=True, eq=False)
class DynamicInferenceRequest:
    """One request. The engine fills in everything below `sampling_params`.

    Attributes:
        request_id: the caller's number, unique among unfinished requests.
        prompt: the text, or None when tokens were given.
        prompt_tokens: int32 `[prompt length]`, CPU.
        sampling_params: its own copy.
        priority: higher is admitted first and evicted last.
        status: see `Status`.
        generated_tokens: token ids, the terminating one included; filled in at the end (and when
            the request is evicted).
        generated_text: detokenized at first use, without the terminating token, and up to the stop
            word, unless asked for; None when the engine has no tokenizer.
        finish_reason: "termination_id", "stop_token", "stop_word", "length", "moved" (exported),
            "stale" (`max_version_lag`), "weight_update" (by its policy), "aborted" or "error".
        error: why the request failed, or None.
        ttft: seconds from arrival to the first token, None before it.
        latency: seconds from arrival to the end.
        record: its sampling parameters for the device; None until it is queued.
        watch_row: row of `TokenWatch`'s table: the tokens that stop words or a grammar must check.
        stop_words_from: see `StopWords.counts_from`.
        log_probs: booked log probs, or None if they were not asked for; the properties below give
            them in Megatron's form.
        routing: the experts of its tokens, or None if they are not recorded; `routing_indices` has
            them.
        forced_routing: experts that its prompt's tokens have to go to, int16 `[positions, layers,
            topk]`; None: the router's choice.
        num_cached_tokens: of its prompt, those that were found in the cache when it was admitted;
            None before that.
        block_hashes: of its sequence's first blocks; see `PrefixCache`.
        rank: in the order of service (`rank_of`), once it is queued; an evicted request keeps it.
        max_length: sequence length at which it ends, once it is queued.
        num_computed: known tokens that its last eviction took from the cache.
        weights: where the weights changed; `weight_versions` and `kv_versions` read it.
        num_moved: tokens that it had generated when another engine exported it; None: it began
            here.
        version_lag: updates of the weights since its first token; see `max_version_lag`.
        traceparent: the trace that it belongs to, as `traces.read_traceparent` gives it; ""
            for none. Log lines name it.
    """

    request_id: int
    prompt: str | None = None
    prompt_tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    sampling_params: SamplingParams
    priority: int = 0
    status: Status = Status.WAITING_IN_QUEUE
    generated_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    ttft: float | None = None
    latency: float | None = None
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    detokenizer: Callable[[list[int]], str | None] | None = field(default=None, repr=False)
    record: SamplingRecord | None = field(default=None, repr=False)
    watch_row: int = field(default=0, repr=False)
    stop_words_from: int = field(default=0, repr=False)
    log_probs: RequestLogProbs | None = field(default=None, repr=False)
    routing: RoutingRecord | None = field(default=None, repr=False)
    forced_routing: NDArray[np.int16] | None = field(default=None, repr=False)
    num_cached_tokens: int | None = None
    block_hashes: list[bytes] = field(default_factory=list, repr=False)
    rank: int = field(default=0, repr=False)
    max_length: int = field(default=0, repr=False)
    num_computed: int = field(default=0, repr=False)
    weights: WeightMarks = field(default_factory=WeightMarks, repr=False)
    num_moved: int | None = field(default=None, repr=False)
    version_lag: int = field(default=0, repr=False)
    traceparent: str = ""
    _text: str | None = field(default=None, init=False, repr=False)

    @property
    def num_known(self) -> int:
        """Tokens to prefill: the prompt, and what was generated before an eviction."""
        return len(self.prompt_tokens) + len(self.generated_tokens)

    @property
    def is_stale(self) -> bool:
        """Whether its weights have been updated more often than it may outlive."""
        most = self.sampling_params.max_version_lag
        return most is not None and self.version_lag > most

    @property
    def weight_versions(self) -> list[Span]:
        """The weights that chose its generated tokens: (version, first token, end), half open. Of a
        score those that gave the log probs of its prompt's tokens."""
        if self.sampling_params.is_score and self.log_probs is not None and self.weights.tokens:
            first = max(self.sampling_params.prompt_log_probs_from, 1)
            end = len(self.prompt_tokens) - self.prompt_log_probs_missing
            return [(self.weights.tokens[-1][1], first, end)] if first < end else []
        return spans(self.weights.tokens, len(self.generated_tokens))

    @property
    def kv_versions(self) -> list[Span]:
        """The weights that its keys, values and states were computed with: (version, first
        position, end), half open, over prompt and generated tokens; the last one is never fed."""
        return spans(self.weights.cache, max(self.num_known - 1, 0))

    @property
    def prompt_log_probs_missing(self) -> int:
        """Log probs of the prompt that are wanted and no step has delivered, the last ones."""
        return 0 if self.log_probs is None else self.log_probs.num_prompt_missing

    @property
    def generated_text(self) -> str | None:
        """Text of the generated tokens, made at first use: the consumer's thread detokenizes, not
        the engine's loop."""
        if self._text is None and self.detokenizer is not None:
            stopped = self.finish_reason in ("termination_id", "stop_token")
            keep = self.sampling_params.detokenize_stop_sequence
            text = self.detokenizer(self.generated_tokens[: -1 if stopped and not keep else None])
            if self.finish_reason == "stop_word" and text is not None:
                words = self.sampling_params.stop_words or ()
                text = cut_at_stop_word(text, words, keep, self.stop_words_from)
            if text is not None and self.sampling_params.echo:
                text = self.prompt_text + text
            if self.finish_reason is None:
                return text  # there is more to come
            self._text = text
        return self._text

    @property
    def prompt_text(self) -> str:
        """The prompt as text, as it was given or detokenized; "" without a tokenizer."""
        if self.prompt is not None:
            return self.prompt
        text = self.detokenizer(self.prompt_tokens.tolist()) if self.detokenizer else ""
        return text or ""

    @property
    def generated_log_probs(self) -> list[float] | None:
        """Log prob of each generated token; None if they were not asked for."""
        return None if self.log_probs is None else self.log_probs.generated()

    @property
    def prompt_log_probs(self) -> list[float] | None:
        """Log prob of each prompt token from `prompt_log_probs_from` on, but of the first; None if
        they were not asked for."""
        return None if self.log_probs is None else self.log_probs.prompt()

    @property
    def generated_top_n_logprobs(self) -> list[dict[str, float]] | None:
        """The likeliest tokens at each generated token, with their log probs. Keys are texts, or
        ids without a tokenizer; of two tokens with the same text, the likelier is kept.
        `log_probs.generated_top_n()` has the ids."""
        return self._by_text(None if self.log_probs is None else self.log_probs.generated_top_n())

    @property
    def prompt_top_n_logprobs(self) -> list[dict[str, float]] | None:
        """The likeliest tokens, by text, with log probs, at each prompt token but the first."""
        return self._by_text(None if self.log_probs is None else self.log_probs.prompt_top_n())

    @property
    def routing_indices(self) -> Rows | None:
        """The experts of each token but the last, which no step is fed, in each layer that has
        experts: uint8 or uint16 `[tokens - 1, layers, topk]`, global ids in the router's order of
        preference. Of a request that was aborted, those of the tokens that were computed. None
        without `enable_routing_replay`, before the end, and of a request that failed. The first
        call may wait for a copy from the device."""
        has_failed = self.finish_reason in (None, "error")
        return None if self.routing is None or has_failed else self.routing.take()

    def _by_text(
        self, places: list[list[tuple[int, float]]] | None
    ) -> list[dict[str, float]] | None:
        if places is None:
            return None

        def text_of(token: int) -> str:
            text = None if self.detokenizer is None else self.detokenizer([token])
            return str(token) if text is None else text

        found: list[dict[str, float]] = []
        for place in places:
            found.append({})
            for token, value in place:
                found[-1].setdefault(text_of(token), value)
        return found

    def add_event(self, type_: DynamicInferenceEventType) -> None:
        """Append an event stamped with the present time."""
        self.events.append(DynamicInferenceEvent(type_, time.time()))

    @property
    def generated_length(self) -> int:
        """Number of generated tokens."""
        return len(self.generated_tokens)

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """A list of this request alone. Megatron makes several of an evicted request and calls them
        a record; here a request is its own record."""
        return [self]

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """The request itself; see `requests`."""
        return self

    def succeeded(self) -> bool:
        """Whether it completed."""
        return self.status == Status.COMPLETED

    def failed(self) -> bool:
        """Whether it failed; `error` says why."""
        return self.status == Status.FAILED

    def __str__(self) -> str:
        return (
            f"request {self.request_id}, {self.status.name}, "
            f"prompt len {len(self.prompt_tokens)}, gen len {len(self.generated_tokens)}"
        )
