"""Who is served: keys, host names, ids that may be repeated."""

import hashlib
import re

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.api_config import ApiConfig, KeyDigest
from megatron_async.server.choice_feed import ChoiceFeed
from megatron_async.server.fields.asked import AnswerStyle, Asked, AskedChoice, Caller
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.access import Access, request_id
from megatron_async.server.http.request_log import RequestNote


def digest(name, key):
    return KeyDigest(name, hashlib.sha256(key).hexdigest())


def bearer(key):
    return {b"authorization": b"Bearer " + key}


CONFIG = ApiConfig(
    coordinator="ipc:///nowhere",
    keys=(digest("ann", b"one"), digest("bob", b"two")),
    admin_key=digest("admin", b"three"),
    allowed_hosts=("llm.example.org",),
)


def test_keys():
    access = Access(CONFIG)
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
    access = Access(CONFIG)
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
