"""Routes for the state of a service, and for commands of administrators."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from megatron_async.errors import CoordinatorLost, UnknownReplica, UpdateError
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import Exchange
from megatron_async.server.http.replies import reply, reply_json
from megatron_async.server.service_metrics import CONTENT_TYPE, metrics_text
from megatron_async.serving.engine_verbs import check_tags
from megatron_async.serving.messages import RemoteError
from megatron_async.serving.token_client import RequestClient
from megatron_async.version import __version__

STATE_S = 2.0
"""Seconds: a question for the state waits for a coordinator that is gone: probes wait little."""
ADMIN_LIMITS = Limits(body_bytes=64 << 10)


class NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a command that takes no fields."""


class PauseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /pause. `mode`: "keep" lets requests wait, "abort" ends them."""

    mode: str = "keep"


class WakeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /wake: what memory to take again; left out, all."""

    tags: list[str] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (tags := getattr(self, name)) is not msgspec.UNSET:
                check_tags(name, tags)


class SleepRequest(WakeRequest, forbid_unknown_fields=True):
    """The body of /sleep: what memory to give back (left out, the KV cache), and of which of it a
    copy is kept on the host."""

    copies: list[str] | msgspec.UnsetType = msgspec.UNSET


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /abort: the id of an answer, or all."""

    id: str | None = None
    all: bool = False


class MoveRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /move: the id of an answer, or the name of a replica, of which all moves."""

    id: str | None = None
    replica: str | None = None


class ProfileRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /profile. `action`: "start" or "stop"."""

    action: str = "start"


class ServiceRoutes:
    """Handlers of the service."""

    def __init__(self, client: RequestClient, config: ApiConfig, model_name: str) -> None:
        self._client, self._config, self.model_name = client, config, model_name

    def routes(self) -> list[Route]:
        """The routes."""
        bodies: dict[str, type[msgspec.Struct]] = {
            "pause": PauseRequest, "abort": AbortRequest, "profile": ProfileRequest,
            "resume": NoFields, "sleep": SleepRequest, "wake": WakeRequest, "drain": NoFields,
            "reset_prefix_cache": NoFields, "move": MoveRequest,
        }  # fmt: skip
        return [
            *(
                Route("GET", path, self._health, is_open=True)
                for path in ("/health", "/v1/health")[: 1 + self._config.as_megatron]
            ),
            Route("GET", "/ready", self._ready, is_open=True),
            Route("GET", "/version", self._version),
            Route("GET", "/metrics", self._metrics),
            *(
                Route(
                    "POST",
                    f"/{verb}",
                    partial(self._do, verb, body),
                    needs_admin=True,
                    is_logged=True,
                )
                for verb, body in bodies.items()
            ),
        ]

    async def _state(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(STATE_S):
                return await self._client.ask("health")
        except (CoordinatorLost, TimeoutError):  # this process connects again when it is back
            return {"state": "restarting", "replicas": 0}

    async def _health(self, exchange: Exchange, _: str) -> None:
        """Whether the service lives: one that starts lost parts again does, and must not be killed
        for it."""
        state = await self._state()
        is_well = state["state"] not in ("loading", "dead")
        await reply_json(exchange.send, state, 200 if is_well else 503)

    async def _ready(self, exchange: Exchange, _: str) -> None:
        """Whether it serves a request now."""
        state = await self._state()
        is_ready = state["state"] == "running" and state["replicas"]
        await reply_json(exchange.send, state, 200 if is_ready else 503)

    async def _version(self, exchange: Exchange, _: str) -> None:
        await reply_json(exchange.send, {"version": __version__})

    async def _metrics(self, exchange: Exchange, _: str) -> None:
        stats = await self._client.ask("stats")
        text = metrics_text(stats, self._config.metrics_names, self.model_name)
        await reply(exchange.send, text, content_type=CONTENT_TYPE.encode())

    async def _do(self, verb: str, kind: type[msgspec.Struct], exchange: Exchange, _: str) -> None:
        """Do a command. Its fields come in the body, or as vLLM's clients send them, in the query;
        one that it does not have is refused, as an administrator meant something by it."""
        found = await read_command(exchange, f"/{verb}", kind, ADMIN_LIMITS)
        fields: dict[str, Any] = msgspec.to_builtins(found)
        if "id" in fields:
            fields["label"] = fields.pop("id")
            fields = {name: value for name, value in fields.items() if value}
            if len(fields) != 1:
                other = '"all": true' if verb == "abort" else "the name of a replica"
                raise Refusal(f"give the id of an answer, or {other}.", param="id")
        await reply_json(exchange.send, await ask_service(self._client, verb, **fields))


async def read_command[K: msgspec.Struct](
    exchange: Exchange, path: str, kind: type[K], limits: Limits
) -> K:
    """The fields of a command, from the query, as vLLM's clients send them, and from the body.

    Raises:
        Refusal: they are not those of `kind`, or beyond the limits.
    """
    body = await exchange.body(limits.body_bytes)
    given = decode_body(body or b"{}", dict[str, Any], limits)
    try:
        query = exchange.scope["query_string"].decode("latin-1")
        pairs, of_query = parse_qsl(query, max_num_fields=100), dict[str, Any]()
        for name, value in pairs:  # a field that is repeated is a list
            values = [value for other, value in pairs if other == name]
            of_query[name] = value if len(values) == 1 else values
        return msgspec.convert(of_query | given, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        takes = ", ".join(kind.__struct_fields__) or "no fields"
        raise Refusal(f"{error}: {path} takes {takes}.") from error


async def ask_service(client: RequestClient, what: str, **fields: Any) -> dict[str, Any]:
    """Ask the service, or tell it what to do.

    Raises:
        Refusal: 404, no replica has that name; 409, it refuses, or an update was dropped; 500, a
            replica failed.
    """
    try:
        return await client.ask(what, **fields)
    except UnknownReplica as error:
        raise Refusal(str(error), 404, code="not_found") from error
    except ValueError as error:
        raise Refusal(str(error), 409, code="not_now") from error
    except UpdateError as error:
        raise Refusal(str(error), 409, code="update_dropped") from error
    except RemoteError as error:  # an administrator may read what failed
        raise Refusal(str(error), 500, code="verb_failed", kind="server_error") from error
