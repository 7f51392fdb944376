"""Routes beside the API, what may take long there and is not done on the event loop, and access:
keys, host names, ids that may be repeated."""

import asyncio
import hashlib
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_async.cli.main import build_parser
from megatron_async.cli.serve import read_settings
from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.observe.statistics import NoOverlapReason
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.answer_stream import StreamHub
from megatron_async.server.api_config import ApiConfig, KeyDigest
from megatron_async.server.chat.template_renderer import TakesLong
from megatron_async.server.choice_feed import ChoiceFeed
from megatron_async.server.fields.asked import AnswerStyle, Asked, AskedChoice, Caller
from megatron_async.server.fields.json_body import Limits
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.request_bodies import ChatRequest, Message
from megatron_async.server.http.access import Access, request_id
from megatron_async.server.http.app import App
from megatron_async.server.http.exchange import read_body
from megatron_async.server.http.generate_routes import GenerateRoutes
from megatron_async.server.http.page_routes import FOLDER, LiveRoutes, page_routes
from megatron_async.server.http.request_log import RequestNote
from megatron_async.server.http.service_routes import ServiceRoutes
from megatron_async.server.http.tokenize_routes import TokenizeRoutes
from megatron_async.server.service_metrics import STATES
from megatron_async.server.supervisor.serve_settings import api_config
from megatron_async.serving.model_card import ModelCard
from tests.support.served_demo import demo, demo_card

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
        (
            "/sleep",
            b'{"tags": ["weights"], "copies": []}',
            ("sleep", {"tags": ["weights"], "copies": []}),
        ),
        ("/wake", b'{"tags": ["kv_cache"]}', ("wake", {"tags": ["kv_cache"]})),
    ):
        assert answer(routes, "POST", path, body)[0] == 200
        assert client.asked.pop() == asked
    for path, body, name in (
        ("/sleep?level=2", b"", "level"),
        ("/sleep", b'{"level": 2}', "level"),
        ("/sleep", b'{"tags": ["gpu"]}', "tags=['gpu'] must be a list of kv_cache and weights"),
        ("/sleep", b'{"copies": ["gpu"]}', "copies=['gpu'] must be a list of"),
        ("/wake", b'{"tags": ["kv_cache", "gpu"]}', "must be a list of kv_cache and weights"),
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


def test_what_takes_long_goes_on_beside_the_loop():
    threads = []

    def read():
        threads.append(threading.current_thread())
        if threading.current_thread() is threading.main_thread():
            raise TakesLong
        return "read"

    assert asyncio.run(read_body(b"{}", read)) == "read"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    threads.clear()
    assert asyncio.run(read_body(b"x" * 100_000, read)) == "read"
    assert len(threads) == 1


def test_a_model_is_ready_for_the_first_chat() -> None:
    """The process for its template runs, so that no event loop is told to wait for that."""

    class Client:
        async def card(self) -> ModelCard:
            return demo_card()

        async def ask(self, what: str) -> dict[str, str]:
            return {"state": "running"}

    async def run() -> None:
        client: Any = Client()
        routes = GenerateRoutes(client, ApiConfig(coordinator=""), StreamHub())
        await routes.prepare()
        served = await routes._model_now()
        chat = ChatRequest(messages=[Message(role="user", content="Hello")])
        assert "Hello" in served.chat.render(chat, None)
        served.chat.close()

    asyncio.run(run())


def digest(name, key):
    return KeyDigest(name, hashlib.sha256(key).hexdigest())


def bearer(key):
    return {b"authorization": b"Bearer " + key}


OPEN_CONFIG = ApiConfig(
    coordinator="ipc:///nowhere",
    keys=(digest("ann", b"one"), digest("bob", b"two")),
    admin_key=digest("admin", b"three"),
    allowed_hosts=("llm.example.org",),
)


def test_keys():
    access = Access(OPEN_CONFIG)
    assert access.caller(bearer(b"two"), False).owner == "bob"
    assert not access.caller(bearer(b"one"), False).is_admin
    assert access.caller(bearer(b"three"), True).is_admin
    for headers, needs_admin, status in (
        ({}, False, 401), (bearer(b"four"), False, 401), (bearer(b""), False, 401),
        ({b"authorization": b"Basic one"}, False, 401), ({}, True, 401),
        (bearer(b"one"), True, 403), (bearer(b"four"), True, 401),
    ):  # fmt: skip
        note = RequestNote("/pause", b"own")
        with pytest.raises(Refusal) as refused:
            access.caller(headers, needs_admin, note)
        assert refused.value.status == status, headers
        # The line of log names a key that is known, and nothing of another.
        assert ("key ann" in note.text()) == (status == 403)
        assert "one" not in note.text()
        assert "four" not in note.text()


def test_a_name_gives_no_rights():
    for name in ("admin", "Admin", "root"):
        with pytest.raises(ConfigurationError, match=f"'{name}'"):
            ApiConfig(
                coordinator="x", keys=(digest(name, b"one"),), admin_key=digest("root", b"two")
            )
    with pytest.raises(ConfigurationError, match="2 API keys are named 'ann'"):
        ApiConfig(coordinator="x", keys=(digest("ann", b"one"), digest("ann", b"two")))
    with pytest.raises(ConfigurationError, match="is an API key too"):
        ApiConfig(coordinator="x", keys=(digest("a", b"one"),), admin_key=digest("b", b"one"))
    config = ApiConfig(coordinator="x", keys=(digest("a", b"one"),), admin_key=digest("b", b"two"))
    access = Access(config)
    for name, key in (("a", b"one"), ("b", b"two")):
        assert access.caller(bearer(key), False) == Caller(name, is_admin=name == "b")


def test_without_keys_all_are_served_but_administrators():
    access = Access(ApiConfig(coordinator="ipc:///nowhere"))
    assert access.caller({}, False).owner == ""
    assert access.caller(bearer(b"anything"), False).owner == ""
    with pytest.raises(Refusal, match="admin-key"):
        access.caller(bearer(b"anything"), True)


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        (b"localhost:8000", True), (b"127.0.0.1", True), (b"[::1]:80", True), (b"[::1]", True),
        (b"LLM.example.org:8000", True), (b"llm.example.org.", True), (b"evil.example.org", False),
        (b"", False), (b"localhost.evil.org:80", False), (b"evil.org:localhost", False),
    ],
)  # fmt: skip
def test_hosts(host, is_served):
    access = Access(OPEN_CONFIG)
    if is_served:
        access.check_host({b"host": host})
        return
    with pytest.raises(Refusal, match="does not answer to the name"):
        access.check_host({b"host": host})


def test_any_host():
    Access(ApiConfig(coordinator="x", allowed_hosts=("*",))).check_host({b"host": b"evil.org"})


def test_ids_that_may_be_repeated():
    assert request_id({b"x-request-id": b"a.B-9_"}) == b"a.B-9_"
    for bad in (b"", b"a b", b"a\r\nset-cookie: x", b"x" * 129, "ä".encode()):
        assert re.fullmatch(rb"[0-9a-f]{24}", request_id({b"x-request-id": bad}))


def test_the_line_of_a_client_that_went_has_its_prompt():
    params = SamplingParams()
    style = AnswerStyle("cmpl-1", 0, "m")
    choices = [AskedChoice(place, place, params) for place in (0, 1)]
    note = RequestNote("/v1/completions", b"own")
    note.sent(Asked([[1, 2, 3], "a text"], choices, 0, style), [ChoiceFeed(print)] * 2)
    assert note.text().startswith(
        "/v1/completions no answer, id own, cmpl-1, 3 tokens in, 0 out, end client gone, "
    )
