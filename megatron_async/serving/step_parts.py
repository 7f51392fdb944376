"""`StepParts`: divides a replica's step into a message for each client."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from megatron_async.serving.messages import Ended, StepTokens
from megatron_async.serving.records import ClientRecord, ReplicaRecord, RoutedRequest
from megatron_async.serving.step_arrays import StepArrays, by_row
from megatron_async.serving.token_routes import TokenRoutes

TOKEN_BYTES = 4
"""Bytes of a token id in a message."""


class StepParts:
    """A step's message, divided: Python per client, per text and per end, not per token.

    Args:
        message: of a replica.
        replica: of it.
        routes: the client of each request.
        clients: by identity.

    Raises:
        ValueError: the message's arrays do not fit together.
    """

    def __init__(
        self,
        message: StepTokens,
        replica: ReplicaRecord,
        routes: TokenRoutes,
        clients: Mapping[bytes, ClientRecord],
    ) -> None:
        self._clients = clients
        message = by_row(message)
        whole = routes.whole(replica.index, message)
        if whole is not None:
            self._parts = dict([whole])
        else:
            self._parts = dict(routes.split(replica.index, StepArrays.of(message)))
        for number, text in message.texts:
            if (request := replica.requests.get(number)) is not None:
                self._part_of(request).texts.append((request.asked.number, text))

    @property
    def num_tokens(self) -> int:
        """Tokens of this step that go to clients."""
        return sum(len(part.tokens) // TOKEN_BYTES for part in self._parts.values())

    def end(self, request: RoutedRequest, ended: Ended) -> None:
        """Add an end, after the tokens."""
        self._part_of(request).ends.append(as_told(request, ended))

    def send(self, send: Callable[[bytes, StepTokens], None]) -> None:
        """Send each connected client its message."""
        identities = {client.index: identity for identity, client in self._clients.items()}
        for index, part in self._parts.items():
            if (identity := identities.get(index)) is not None:
                send(identity, part)

    def _part_of(self, request: RoutedRequest) -> StepTokens:
        return self._parts.setdefault(self._clients[request.client].index, StepTokens())


def as_told(request: RoutedRequest, ended: Ended) -> Ended:
    """An end as the request's client is told it."""
    return msgspec.structs.replace(ended, number=request.asked.number, attempts=request.attempts)
