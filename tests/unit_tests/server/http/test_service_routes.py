"""Liveness and readiness, and fields of commands, in the body and in the query."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from megatron_async.errors import CoordinatorLost
from megatron_async.server.api_config import ApiConfig, KeyDigest
from megatron_async.server.fields.json_body import Limits
from megatron_async.server.http.access import Access
from megatron_async.server.http.app import App
from megatron_async.server.http.service_routes import ServiceRoutes
from megatron_async.server.http.tokenize_routes import TokenizeRoutes
from megatron_async.server.service_metrics import STATES
from tests.support.served_demo import demo

CONFIG = ApiConfig(coordinator="", admin_key=KeyDigest("", hashlib.sha256(b"boss").hexdigest()))


class Coordinated:
    """A client whose coordinator tells one state."""

    def __init__(self, state: dict[str, Any] | Exception) -> None:
        self.state, self.asked = state, []

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        self.asked.append((what, fields))
        return self.state


def answer(routes: Any, method: str, path: str, body: bytes = b"") -> tuple[int, Any, dict]:
    path, _, query = path.partition("?")
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"),
               (b"authorization", b"Bearer boss")]  # fmt: skip
    scope = {"type": "http", "method": method, "path": path, "headers": headers,
             "query_string": query.encode(), "http_version": "1.1", "state": {}}  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    app = App(routes.routes(), Access(CONFIG))
    asyncio.run(app(scope, receive, send))
    told = dict(sent[0]["headers"])
    return sent[0]["status"], json.loads(sent[1]["body"]), told


@pytest.mark.parametrize("state", [*STATES, None])
def test_who_heals_lives_and_who_serves_is_ready(state: str | None) -> None:
    told = CoordinatorLost("gone") if state is None else {"state": state, "replicas": 1}
    routes = ServiceRoutes(Coordinated(told), CONFIG, "tiny")  # type: ignore[arg-type]
    status, body, headers = answer(routes, "GET", "/health")
    assert body["state"] == (state or "restarting")
    assert status == (503 if state in ("loading", "dead") else 200)
    assert answer(routes, "GET", "/ready")[0] == (200 if state == "running" else 503)
    assert len(headers[b"x-request-id"]) == 24


def test_commands_have_the_fields_that_they_name() -> None:
    client = Coordinated({})
    routes = ServiceRoutes(client, CONFIG, "tiny")  # type: ignore[arg-type]
    for path, body, asked in (
        ("/pause?mode=abort", b"", ("pause", {"mode": "abort"})),
        ("/pause", b'{"mode": "abort"}', ("pause", {"mode": "abort"})),
        ("/pause", b"", ("pause", {"mode": "keep"})),
        ("/abort?all=true", b"", ("abort", {"all": True})),
        ("/abort", b'{"id": "cmpl-1"}', ("abort", {"label": "cmpl-1"})),
        ("/sleep", b"{}", ("sleep", {})),
    ):
        assert answer(routes, "POST", path, body)[0] == 200
        assert client.asked.pop() == asked
    for path, body, name in (
        ("/sleep?level=2", b"", "level"),
        ("/sleep", b'{"level": 2}', "level"),
        ("/pause", b'{"mod": "abort"}', "mod"),
        ("/pause?wait=1", b"", "wait"),
        ("/wake?tags=weights", b"", "tags"),
        ("/drain", b'{"timeout": 5}', "timeout"),
        ("/abort?all=perhaps", b"", "all"),
        ("/reset_prefix_cache?reset_running_requests=true", b"", "reset_running_requests"),
    ):
        status, told, _ = answer(routes, "POST", path, body)
        assert status == 400
        assert name in told["error"]["message"]
        assert not client.asked


def test_a_prompts_fields_are_read_or_refused() -> None:
    async def served() -> Any:
        return demo()

    routes = TokenizeRoutes(served, Limits())

    def tokens(**body: Any) -> tuple[int, Any]:
        status, told, _ = answer(routes, "POST", "/tokenize", json.dumps(body).encode())
        return status, told.get("tokens") or told["error"]["param"]

    chat = [{"role": "user", "content": "Hi"}]
    tools = [{"function": {"name": "now", "parameters": {}}}]
    plain = tokens(messages=chat)[1]
    assert tokens(messages=chat, tools=tools)[1] != plain
    assert tokens(messages=chat, temperature=1, max_tokens=5) == (200, plain)
    for name, value in (
        ("chat_template", "{{ 1 }}"), ("truncate_prompt_tokens", 3),
        ("mm_processor_kwargs", {"a": 1}), ("prompt", "Hi"),
        ("system", "Be brief."), ("functions", tools),
    ):  # fmt: skip
        assert tokens(messages=chat, **{name: value}) == (400, name)
    for name, value in (
        ("tools", tools), ("chat_template_kwargs", {"enable_thinking": False}),
        ("continue_final_message", True), ("documents", [{"text": "x"}]), ("input", "Hi"),
    ):  # fmt: skip
        assert tokens(prompt="Hi", **{name: value}) == (400, name)
