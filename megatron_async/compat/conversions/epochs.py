"""Which generation of weights made which part of a request, for reinforcement learning.

Megatron's requests carry two sparse lists of (first token, epoch): `policy_epoch`, of the weights
that chose the tokens, and `kv_cache_epoch`, of the weights that the keys and values are of. The
first is stamped whenever the epoch changes; the second begins anew when a request is evicted, since
all of its keys and values are then computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
)

Epochs = list[tuple[int, int]]


@dataclass(frozen=True)
class _Stamp:
    timestamp: float
    first_token: int
    epoch: int


@dataclass
class EpochStamps:
    """The stamps of one request."""

    _stamps: list[_Stamp] = field(default_factory=list)

    def stamp(self, timestamp: float, num_tokens: int, epoch: int) -> None:
        """The epoch changes, or the request comes.

        Args:
            timestamp: `time.time()`.
            num_tokens: of prompt and generation that are known.
            epoch: from now on.
        """
        first = num_tokens - 1 if self._stamps else 0
        self._stamps.append(_Stamp(timestamp, first, epoch))

    def policy(self) -> Epochs | None:
        """`policy_epoch`; None where no epoch was ever told."""
        if not self._stamps:
            return None
        return [(stamp.first_token, stamp.epoch) for stamp in self._stamps]

    def kv_cache(self, request: DynamicInferenceRequest) -> Epochs | None:
        """`kv_cache_epoch` of the request with these stamps."""
        if not self._stamps:
            return None
        kinds = [event.type for event in request.events]
        evictions = [i for i, k in enumerate(kinds) if k is DynamicInferenceEventType.EVICT]
        if not evictions:
            return self.policy()
        # Keys and values are those of the weights that were there when it was admitted again; while
        # it waits, of those that are there now.
        behind = request.events[evictions[-1] + 1 :]
        admissions = (e for e in behind if e.type is DynamicInferenceEventType.ADD_CONTEXT)
        again = next((event.timestamp for event in admissions), float("inf"))
        before = [stamp for stamp in self._stamps if stamp.timestamp <= again]
        after = self._stamps[len(before) :]
        first = before[-1].epoch if before else after[0].epoch
        return [(0, first), *((stamp.first_token, stamp.epoch) for stamp in after)]
