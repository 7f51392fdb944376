"""The ASGI application of an API process: host, route, key, handler, and errors as answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from megatron_async.errors import CoordinatorLost, ReplicaLost
from megatron_async.server.fields.refusal import Refusal, refusal_of
from megatron_async.server.http.access import REQUEST_ID, Access, request_id
from megatron_async.server.http.exchange import Exchange
from megatron_async.server.http.replies import ClientGone, Send, refuse
from megatron_async.server.http.request_log import RequestNote

logger = logging.getLogger("megatron_async")

Handler = Callable[[Exchange, str], Awaitable[None]]
"""Answers one request; the text is what stands for `*` in the route's path."""


class Route(NamedTuple):
    """A path that is served. `is_open`: it needs no key. `is_logged`: its requests have a line of
    log each.

    Attributes:
        method: "GET" (which serves HEAD too) or "POST".
        path: as "/v1/models/*"; a star at its end stands for anything but nothing.
    """

    method: str
    path: str
    handler: Handler
    is_open: bool = False
    needs_admin: bool = False
    error_body: Callable[[Refusal], bytes] = Refusal.body
    is_logged: bool = False


class App:
    """Gives requests to handlers. Behind `root_path` a proxy has mounted the server; "" is its
    root. `logs`: whether requests of routes that are logged have their line. `make_ready` makes
    what the first requests would wait for."""

    def __init__(
        self,
        routes: list[Route],
        access: Access,
        root_path: str = "",
        logs: bool = False,
        make_ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._below: dict[str, dict[str, Route]] = {}
        self._access, self._root, self._logs = access, root_path.rstrip("/"), logs
        self._make_ready = make_ready
        for route in routes:
            table, path = self._exact, route.path
            if path.endswith("*"):
                table, path = self._below, path[:-1]
            table.setdefault(path, {})[route.method] = route

    async def prepare(self) -> None:
        """Make what the first requests would wait for, once a replica is there."""
        if self._make_ready is not None:
            await self._make_ready()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """One request of ASGI."""
        headers = dict(scope["headers"])
        own_id = scope["state"]["request_id"] = request_id(headers)
        exchange = Exchange(scope, receive, send, headers, ((REQUEST_ID, own_id),))
        error_body: Callable[[Refusal], bytes] = Refusal.body
        note: RequestNote | None = None
        try:
            self._access.check_host(headers)
            route, rest = self._find(scope["method"], scope["path"])
            error_body = route.error_body
            if self._logs and route.is_logged:
                note = exchange.note = RequestNote(route.path, own_id)
            if not route.is_open:
                came_to = scope.get("server")
                exchange.caller = self._access.caller(headers, route.needs_admin, note, came_to)
            await route.handler(exchange, rest)
        except ClientGone:
            pass
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else _refusal_of(error, scope["path"])
            if note is not None:
                note.refusal = refusal
            await refuse(exchange.send, refusal, error_body)
        finally:
            if note is not None:
                note.write()

    def _find(self, method: str, path: str) -> tuple[Route, str]:
        """The route of a path (404: there is none; 405: not for this method), and what stands for
        its star."""
        if self._root and path.startswith(self._root + "/"):
            path = path[len(self._root) :]
        found, rest = self._exact.get(path), ""
        if found is None:
            for start, routes in self._below.items():
                if path.startswith(start) and len(path) > len(start):
                    found, rest = routes, path[len(start) :]
        if found is None:
            raise Refusal(
                f"there is nothing at {path[:100]!r}: /openapi.json lists what is served.", 404,
                code="unknown_url",
            )  # fmt: skip
        route = found.get("GET" if method == "HEAD" else method)
        if route is None:
            raise Refusal(
                f"{path[:100]!r} is not served for {method[:20]}: use {' or '.join(found)}.", 405,
                code="method_not_allowed",
            )  # fmt: skip
        return route, rest


def _refusal_of(error: Exception, path: str) -> Refusal:
    if isinstance(error, CoordinatorLost | ReplicaLost):
        return refusal_of(type(error).__name__, str(error))
    # Nothing of the request: it may hold what is not the log's.
    logger.error("A request to %s failed.", path[:100].encode("ascii", "replace"), exc_info=error)
    return refusal_of(type(error).__name__, "")
