"""`RequestClient`: the interface through which an HTTP process sends its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.readers import TokenReader


class RequestClient(Protocol):
    """Implemented by `TokenClient` and `FleetClient`."""

    def send(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams,
        reader: TokenReader,
        priority: int = 0,
        owner: str = "",
        label: str = "",
        traceparent: str = "",
    ) -> int:
        """Send one request; see `TokenClient.send`."""

    def abort(self, number: int) -> None:
        """End a request that `send` returned; one that has ended stays as it is."""

    async def card(self) -> ModelCard:
        """The card of the served model; waits for the first replica."""

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask something of the service, or tell it what to do; ValueError: it cannot do that."""
