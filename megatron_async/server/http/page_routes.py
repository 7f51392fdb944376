"""The page for people at "/": files of the package, served as they are, and the endpoints that the
page polls.

The files load nothing from elsewhere, and the policy that is sent with them lets a browser run no
other code and ask no other host: what a model writes is a stranger's text.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import Exchange
from megatron_async.server.http.replies import Headers, reply, reply_json
from megatron_async.server.http.service_routes import NoFields
from megatron_async.serving.token_client import TokenClient

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = b"; ".join(
    (
        b"default-src 'none'", b"script-src 'self'", b"style-src 'self'", b"connect-src 'self'",
        b"img-src 'self'", b"base-uri 'none'", b"form-action 'none'", b"frame-ancestors 'none'",
        b"require-trusted-types-for 'script'", b"trusted-types 'none'",
    )
)  # fmt: skip
"""Content-Security-Policy. Trusted types make every sink of HTML (innerHTML) an error."""
HEADERS: Headers = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def page_routes() -> list[Route]:
    """The routes of the page; its files are read once, and need no key."""
    files = {
        path.name: (path.read_bytes(), TYPES[path.suffix])
        for path in FOLDER.iterdir()
        if path.suffix in TYPES
    }

    async def show(file: str | None, exchange: Exchange, rest: str) -> None:
        found = files.get(file or rest)
        if found is None:
            raise Refusal(f"the page has no file {rest[:100]!r}.", 404, code="unknown_url")
        await reply(exchange.send, found[0], content_type=found[1], headers=HEADERS)

    return [
        Route("GET", "/", partial(show, INDEX), is_open=True),
        Route("GET", "/page/*", partial(show, None), is_open=True),
    ]


LIMITS = Limits(body_bytes=1 << 10)
COUNTERS = (
    "steps", "overlapped_steps", "rows", "generated_tokens", "prefill_tokens", "lookahead",
    "waiting_requests", "slots", "slots_in_use", "kv_blocks", "kv_blocks_in_use",
)  # fmt: skip
"""Entries of an engine's statistics that /live returns."""
REASON = "no_overlap_"
"""Begin of the names of counters of steps that did not overlap."""


class LiveRoutes:
    """Handlers of /live and /watch."""

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
        decode_body(await exchange.body(LIMITS.body_bytes), NoFields, LIMITS)
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
