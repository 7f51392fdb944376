"""`ServiceCounters`: a coordinator's counters of the requests of the whole service.

A request is counted once, at its end. The set of histograms is vLLM's, so that its dashboards work;
the bounds differ. `LoadLines` logs now and then how busy the service is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from megatron_async.serving.messages import Ended

REASONS = (
    "length", "termination_id", "stop_token", "stop_word", "grammar", "aborted", "weight_update",
    "moved", "stale", "error",
)  # fmt: skip
"""Why requests end; a reason that is none of these counts as "error"."""


def _one_two_five(first: int, last: int) -> tuple[float, ...]:
    """1, 2 and 5 times the powers of ten from 10**first up to 10**last."""
    steps = [float(f"{digit}e{power}") for power in range(first, last) for digit in (1, 2, 5)]
    return (*steps, float(f"1e{last}"))


SECONDS = _one_two_five(-3, 3)
SHORT_SECONDS = _one_two_five(-4, 1)
TOKENS = _one_two_five(0, 6)

HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "ttft_seconds": SECONDS,
    "inter_token_seconds": SHORT_SECONDS,
    "e2e_seconds": SECONDS,
    "queue_seconds": SECONDS,
    "prefill_seconds": SECONDS,
    "decode_seconds": SECONDS,
    "inference_seconds": SECONDS,
    "prompt_tokens": TOKENS,
    "generated_tokens": TOKENS,
}
"""Upper bounds of each histogram's buckets but the last, which has none."""


class Histogram:
    """Values, counted by bucket.

    Attributes:
        counts: of each bucket, one more than there are bounds; a value on a bound is below it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value; a value below 0, from clocks that disagree, counts as 0."""
        value = max(value, 0.0)
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class ServiceCounters:
    """Counters since the start of a coordinator. They survive its replicas, so they only rise.

    Attributes:
        prompt_tokens: of requests that have ended; `cached_tokens` of these were in a cache.
        generated_tokens: that went to clients, as they go.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}

    def generated(self, tokens: int) -> None:
        """Count tokens that were sent to clients."""
        self.generated_tokens += tokens

    def ended(self, ended: Ended, wait_s: float = 0.0) -> None:
        """A request has ended, which waited for a replica in the coordinator (the last time) for
        `wait_s` seconds. Replicas do not report single times between tokens: each counts as the
        request's mean."""
        reason, prompt = ended.finish_reason, ended.num_prompt_tokens
        tokens = ended.num_generated_tokens
        self.reasons[reason if reason in REASONS else "error"] += 1
        self.prompt_tokens += prompt
        self.cached_tokens += ended.num_cached_tokens or 0
        if reason in ("error", "aborted", None) and not tokens:
            return  # it says nothing of how long an answer takes
        histograms, ttft, latency = self.histograms, ended.ttft, ended.latency
        histograms["prompt_tokens"].add(prompt)
        histograms["generated_tokens"].add(tokens)
        queue = 0.0 if ended.queue_s is None else ended.queue_s
        histograms["queue_seconds"].add(wait_s + queue)
        if latency is not None:
            histograms["e2e_seconds"].add(wait_s + latency)
            histograms["inference_seconds"].add(latency - queue)
        if ttft is None:
            return
        histograms["ttft_seconds"].add(wait_s + ttft)
        histograms["prefill_seconds"].add(ttft - queue)
        if latency is not None:
            histograms["decode_seconds"].add(latency - ttft)
            if (gaps := tokens - 1) > 0:
                histograms["inter_token_seconds"].add((latency - ttft) / gaps, gaps)

    def as_dict(self) -> dict[str, Any]:
        """For `stats`: `reasons`, `prompt_tokens`, `cached_tokens`, `generated_tokens`, and
        `histograms`, by name the counts of buckets and the sum."""
        return {
            "reasons": dict(self.reasons),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "histograms": {
                name: {"counts": list(histogram.counts), "sum": histogram.total}
                for name, histogram in self.histograms.items()
            },
        }


def cumulative(name: str, counts: Sequence[int]) -> list[tuple[str, float]]:
    """How many values do not exceed each bound, as Prometheus wants a histogram: pairs of the
    bound, as text, and the number."""
    bounds = [*(repr(bound) for bound in HISTOGRAMS[name]), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts)), strict=True))


def labelled(
    kind: Callable[..., Any],
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Any:
    """A family of metrics of this kind, with a value for each tuple of labels' values."""
    family = kind(name, text, labels=labels)
    for own, value in values:
        family.add_metric(own, value)
    return family


LOAD_EVERY_S = 10.0


class LoadLines:
    """Says every `LOAD_EVERY_S` seconds what a service does, while it does anything."""

    def __init__(self, now: float) -> None:
        self._told, self._before = now, (0, 0)

    def line(self, stats: Mapping[str, Any], now: float) -> str:
        """The line that is due, or ""."""
        passed = now - self._told
        if passed < LOAD_EVERY_S:
            return ""
        service = stats["service"]
        counts = service["prompt_tokens"], service["generated_tokens"]
        read, written = (new - old for new, old in zip(counts, self._before, strict=True))
        self._told, self._before = now, counts
        running, waiting = running_and_waiting(stats)
        if not (running or waiting or read or written):
            return ""
        engines = [replica["engine"] for replica in stats["replicas"].values()]
        blocks = sum(engine.get("kv_blocks", 0) for engine in engines)
        used = sum(engine.get("kv_blocks_in_use", 0) for engine in engines)
        return (
            f"Load: {running} running, {waiting} waiting; "
            f"{written / passed:.1f} tokens/s generated, "
            f"{read / passed:.1f} prompt tokens/s (of ended requests); "
            f"{used:.0f} of {blocks:.0f} KV blocks in use{_share(used, blocks)}."
        )


def _share(part: float, whole: float) -> str:
    return f" ({100 * part / whole:.1f} %)" if whole else ""


def running_and_waiting(stats: Mapping[str, Any]) -> tuple[int, int]:
    """Requests that hold a slot, and those that wait for one.

    An engine's own figures are as old as its last answer to a ping, so that a request whose end is
    booked would run on for half a second: how many there are the coordinator's books say.
    """
    running, waiting = 0, int(stats["queued_requests"])
    for replica in stats["replicas"].values():
        engine, unfinished = replica["engine"], replica["unfinished_requests"]
        without_slot = min(int(engine.get("waiting_requests", 0)), unfinished)
        held = min(unfinished - without_slot, int(engine.get("slots", unfinished)))
        running, waiting = running + held, waiting + unfinished - held
    return running, waiting
