"""/live and /watch: an engine's counters, and its newest steps, for the page."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import Exchange
from megatron_async.server.http.replies import reply_json
from megatron_async.serving.token_client import TokenClient

LIMITS = Limits(body_bytes=1 << 10)
COUNTERS = (
    "steps", "overlapped_steps", "rows", "generated_tokens", "prefill_tokens", "lookahead",
    "waiting_requests", "slots", "slots_in_use", "kv_blocks", "kv_blocks_in_use",
)  # fmt: skip
"""Entries of an engine's statistics that /live returns."""
REASON = "no_overlap_"
"""Begin of the names of counters of steps that did not overlap."""


class WatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /watch: an object without fields."""


class LiveRoutes:
    """Handlers of /live and /watch.

    Args:
        client: of the coordinator.
        config: of the process.
    """

    def __init__(self, client: TokenClient, config: ApiConfig) -> None:
        self._client = client
        self._has_keys = bool(config.keys) or config.admin_key is not None

    def routes(self) -> list[Route]:
        """The routes. To watch makes an engine's thread work, a little: a service with keys
        lets only its administrator do it; one without is reached from its own host alone."""
        return [
            Route("GET", "/live", self._live),
            Route("POST", "/watch", self._watch, needs_admin=self._has_keys),
        ]

    async def _live(self, exchange: Exchange, _: str) -> None:
        stats = await self._client.ask("stats")
        engines = {name: replica["engine"] for name, replica in stats["replicas"].items()}
        await self._tell(exchange, stats, {name: _told(engines[name]) for name in engines})

    async def _watch(self, exchange: Exchange, _: str) -> None:
        decode_body(await exchange.body(LIMITS.body_bytes), WatchRequest, LIMITS)
        looked = await self._client.ask("watch")
        await self._tell(exchange, await self._client.ask("stats"), looked["replicas"])

    async def _tell(
        self, exchange: Exchange, stats: dict[str, Any], replicas: dict[str, Any]
    ) -> None:
        answer = {
            "state": stats["state"],
            "queued_requests": stats["queued_requests"],
            "replicas": replicas,
        }
        await reply_json(exchange.send, answer)


def _told(engine: dict[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {name: engine[name] for name in COUNTERS if name in engine}
    found["no_overlap"] = {
        name.removeprefix(REASON): count
        for name, count in engine.items()
        if name.startswith(REASON) and count
    }
    return found
