"""What a fleet's ingress and its replicas tell each other: msgpack, inside of what carries it.

A fleet's manager (Ray Serve, `ray_app.py`) starts replicas and carries bytes. What is in them is
here, and everything else is as in `serving/messages.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from megatron_async.serving.messages import Done, ReplicaHello, StepTokens


class FleetBatch(msgspec.Struct, frozen=True):
    """From a replica: the news of all requests of one ingress.

    Attributes:
        sequence: 0, 1, 2 ... for this ingress. Batches travel with different calls, hence may
            come in another order.
        begun: numbers of requests that the replica has begun since the last batch.
    """

    sequence: int
    begun: list[int]
    steps: list[StepTokens]


class InOrder:
    """Batches of one replica in the order of their numbers, whichever comes first."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, FleetBatch] = {}

    def take(self, sequence: int, batch: FleetBatch) -> Iterator[FleetBatch]:
        """Take one in, and give all whose turn has come."""
        self._early[sequence] = batch
        while (found := self._early.pop(self._next, None)) is not None:
            self._next += 1
            yield found


INGRESS_BITS = 32
"""Lowest bits of a request's number, which count the requests of one ingress."""
MOST_INGRESSES = 2**30
"""Ingresses draw their own numbers below: two of 100 are equal once in 200,000 starts."""


def ingress_of(number: int) -> int:
    """The ingress of a request."""
    return number >> INGRESS_BITS


def first_number(ingress: int) -> int:
    """The number of an ingress' first request."""
    return ingress << INGRESS_BITS


encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(FleetBatch).decode
decode_done = msgspec.msgpack.Decoder(Done).decode
decode_hello = msgspec.msgpack.Decoder(ReplicaHello).decode
