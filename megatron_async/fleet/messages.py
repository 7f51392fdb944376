"""What a fleet's ingress and its replicas tell each other: msgpack, inside of what carries it.

A fleet's manager (Ray Serve, `ray_app.py`) starts replicas, chooses one for each request and
carries bytes. What is in them is here, and everything else is as in `messages.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatron_async.serving.messages import Generate, StepTokens


class FleetRun(msgspec.Struct, frozen=True):
    """To a replica: serve this.

    Attributes:
        asked: the request; its number is unique in the fleet (`ingress_of`).
        attempt: 0 for the first replica that has it, 1 for the next one.
    """

    asked: Generate
    attempt: int


class FleetBatch(msgspec.Struct, frozen=True):
    """From a replica: what is new of all requests of one ingress.

    Attributes:
        replica: its name, which no other replica ever has.
        sequence: 0, 1, 2 ... for this ingress. Batches travel with different calls, hence may
            come in another order.
        begun: number and attempt of requests that the replica has begun since the last batch.
        steps: what its steps told, oldest first.
    """

    replica: str
    sequence: int
    begun: list[tuple[int, int]]
    steps: list[StepTokens]


class RouteHint(NamedTuple):
    """What a router must know of a request, without a look at the request itself.

    Attributes:
        number: of the request.
        hashes: of the blocks that the prompt begins with; see `routing.prompt_hashes`.
        tokens: that it may need, prompt and answer.
        blocks: KV blocks for these.
        replica: name of the only one that it is for; "": any.
    """

    number: int = -1
    hashes: tuple[bytes, ...] = ()
    tokens: int = 0
    blocks: int = 0
    replica: str = ""


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


def encode_run(run: FleetRun) -> bytes:
    """The bytes of a request.

    Raises: one of `messages.UNSENDABLE`.
    """
    return _encoder.encode(run)


_encoder = msgspec.msgpack.Encoder()
decode_run = msgspec.msgpack.Decoder(FleetRun).decode
encode_batch = _encoder.encode
decode_batch = msgspec.msgpack.Decoder(FleetBatch).decode
