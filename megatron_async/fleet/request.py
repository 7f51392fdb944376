"""What a `FleetClient` knows of its requests, and of the order of what replicas tell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_async.fleet.messages import FleetBatch
from megatron_async.serving.messages import Generate
from megatron_async.serving.records import RoutedRequest
from megatron_async.serving.sent_request import SentRequest
from megatron_async.serving.token_routes import TokenRoutes

NO_ROUTES = TokenRoutes()
"""An ingress has one client, itself: there is nothing to look up."""


@dataclass(eq=False)
class FleetRequest(RoutedRequest):
    """An unfinished request of a fleet.

    Attributes:
        sent: the reader's side of it.
        served_by: name of the replica that has begun it; "": none has, or that one is lost.
        over: set at its end.
    """

    sent: SentRequest = field(kw_only=True)
    served_by: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, asked: Generate, sent: SentRequest, now: float) -> FleetRequest:
        """A new request.

        Args:
            asked: what it asks for, with its number.
            sent: the reader's side of it.
            now: seconds.
        """
        return cls(asked.number, b"", asked, NO_ROUTES, received_at=now, sent=sent)

    @property
    def has_started(self) -> bool:
        """Whether the replica that serves it has told a token of it."""
        return self.sent.has_started

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.over.is_set()


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
