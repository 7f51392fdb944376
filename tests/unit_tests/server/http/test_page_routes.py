"""The page at "/": its files, what is sent with them, and who may look at the engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_async.cli.main import build_parser
from megatron_async.cli.serve import read_settings
from megatron_async.observe.statistics import NoOverlapReason
from megatron_async.server.api_config import ApiConfig, KeyDigest
from megatron_async.server.http.access import Access
from megatron_async.server.http.app import App
from megatron_async.server.http.page_routes import FOLDER, LiveRoutes, page_routes
from megatron_async.server.supervisor.serve_settings import api_config

KEY = KeyDigest("k", "0" * 64)
FILES = sorted(path.name for path in FOLDER.iterdir())


class Coordinator:
    """Answers as one with one replica does."""

    async def ask(self, what: str) -> dict[str, Any]:
        counters = {"steps": 3, "rows": 5, "no_overlap_serial": 2, "no_overlap_drained": 0}
        if what == "watch":
            return {"replicas": {"r": {"steps": 4, "spans": []}}}
        replicas = {"r": {"engine": counters}}
        return {"state": "running", "queued_requests": 1, "replicas": replicas}


def ask(
    path: str, config: ApiConfig, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of an answer of the ASGI application."""
    routes = LiveRoutes(Coordinator(), config).routes()  # type: ignore[arg-type]
    app = App([*routes, *(page_routes() if config.page else [])], Access(config))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    given = {"host": "localhost", "content-type": "application/json", **headers}
    scope = {
        "method": method, "path": path, "state": {},
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


OPEN = ApiConfig(coordinator="x")
CLOSED = ApiConfig(coordinator="x", keys=(KEY,))


@pytest.mark.parametrize("file", ["", *FILES])
def test_its_files_need_no_key_and_have_a_policy(file: str) -> None:
    status, headers, body = ask(f"/page/{file}" if file else "/", CLOSED)
    assert status == 200
    assert body == (FOLDER / (file or "index.html")).read_bytes()
    policy = dict(
        part.strip().split(" ", 1)
        for part in headers[b"content-security-policy"].decode().split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)
    assert headers[b"x-content-type-options"] == b"nosniff"
    kind = {"js": b"text/javascript", "css": b"text/css", "svg": b"image/svg"}
    expected = kind.get(file.rpartition(".")[2], b"text/html")
    assert headers[b"content-type"].startswith(expected)


@pytest.mark.parametrize("path", ["/page/", "/page/../api_config.py", "/page/x.js", "/page/.."])
def test_nothing_else_is_served(path: str) -> None:
    assert ask(path, OPEN)[0] == 404


def test_there_need_not_be_a_page() -> None:
    for path in ("/", "/page/main.js"):
        assert ask(path, ApiConfig(coordinator="x", page=False))[0] == 404


@pytest.mark.parametrize(("words", "has_page"), [([], True), (["--no-page"], False)])
def test_the_command_line_decides(words: list[str], has_page: bool) -> None:
    arguments = build_parser().parse_args(["serve", "dummy:tiny", *words])
    assert api_config(read_settings(arguments), "x").page is has_page


def test_its_code_makes_no_html_of_texts_and_asks_no_other_host() -> None:
    markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    )
    for file in FOLDER.glob("*.js"):
        assert not markup.search(file.read_text()), file
    for file in FOLDER.iterdir():
        hosts = set(re.findall(r"https?://[^\s\"'`)]+", file.read_text()))
        assert hosts <= {"http://www.w3.org/2000/svg"}, file
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?! type=\"module\" src=)", html)
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', html))
    for file in FOLDER.glob("*.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', file.read_text()))
    assert named | {"index.html"} == set(FILES)


def test_every_field_of_the_page_has_a_name() -> None:
    html = (FOLDER / "index.html").read_text()
    labelled = set(re.findall(r'<label for="(\w+)"', html))
    for label in re.findall(r"<label[^>]*>(.*?)</label>", html, re.DOTALL):
        labelled |= set(re.findall(r'id="(\w+)"', label))
    assert set(re.findall(r'<(?:input|textarea|select) id="(\w+)"', html)) <= labelled


def test_the_page_knows_every_reason() -> None:
    known = (FOLDER / "engine.js").read_text()
    assert all(f"  {reason}: " in known for reason in NoOverlapReason)


def test_live_tells_counters_to_who_may_ask() -> None:
    status, _, body = ask("/live", OPEN)
    assert status == 200
    assert b'"no_overlap":{"serial":2}' in body
    assert b'"queued_requests":1' in body
    assert ask("/live", CLOSED)[0] == 401


def test_only_administrators_watch_a_service_with_keys() -> None:
    status, _, body = ask("/watch", OPEN, "POST", b"{}")
    assert status == 200
    assert b'"replicas":{"r":{"steps":4,"spans":[]}}' in body
    assert ask("/watch", CLOSED, "POST", b"{}")[0] == 403
    assert ask("/watch", ApiConfig(coordinator="x", admin_key=KEY), "POST", b"{}")[0] == 401
    assert ask("/watch", OPEN, "POST")[0] == 400  # no body: what another site's page could send


def test_files_are_part_of_the_package() -> None:
    assert '"server/page/*"' in (Path(__file__).parents[4] / "setup.py").read_text()
