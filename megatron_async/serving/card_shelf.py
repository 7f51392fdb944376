"""`CardShelf`: the model card that a coordinator keeps for clients, unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.serving.messages import Card


class CardShelf:
    """Keeps one card, since the replicas of a coordinator serve one model."""

    def __init__(self) -> None:
        self._card: Card | None = None

    def has(self, digest: str) -> bool:
        """Whether the card is there."""
        return self._card is not None and self._card.digest == digest

    def put(self, card: Card) -> bool:
        """Keep a card; returns whether there was another one before."""
        is_other = self._card is not None and not self.has(card.digest)
        self._card = card
        return is_other

    def answer(self, fields: Mapping[str, Any]) -> dict[str, object]:
        """The answer to a client that has the card `fields["digest"]`, or none: empty if there is
        no card, and the card itself if the client does not have it."""
        if self._card is None:
            return {}
        found: dict[str, object] = {"digest": self._card.digest}
        if fields.get("digest") != self._card.digest:
            found["card"] = self._card.data
        return found
