"""Keys of the API: their sources, and what is kept of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megatron_async.errors import ConfigurationError
from megatron_async.server.supervisor.keys import (
    MOST_KEYS,
    read_admin_key,
    read_keys,
    read_password,
    without_keys,
)
from megatron_async.server.supervisor.serve_settings import ServeSettings


def keys_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_three_sources_one_list(tmp_path: Path) -> None:
    file = keys_file(tmp_path, "# team\n\nalice sk-a\n  sk-b  \n")
    keys = read_keys(["sk-c", "sk-b"], file, {"MEGATRON_ASYNC_API_KEY": "sk-d, sk-a,"})
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in ("sk-c", "sk-b", "sk-a", "sk-d")]
    assert [key.sha256 for key in keys] == digests
    assert [key.name for key in keys] == ["key-1", "key-2", "alice", "key-5"]
    assert read_keys([], None, {}) == ()


def test_no_key_shares_a_name_by_accident(tmp_path: Path) -> None:
    def check(text: str, given: tuple[str, ...] = ()) -> None:
        ServeSettings(model="m", keys=read_keys(given, keys_file(tmp_path, text), {}))

    check("alice sk-a\nbob sk-b\nsk-c")
    for text, said in (
        ("alice sk-a\nalice sk-b", "named 'alice'"),
        ("key-2 sk-a\nsk-b", "named 'key-2'"),
        ("admin sk-a", "'admin'"),
        ("ADMIN sk-a", "'ADMIN'"),
        ("alice sk-a\nbob sk-a", "'alice' and 'bob' have the same key"),
        ("al\x1b[31mice sk-a", "printable"),
        ("al\u2028ice sk-a", "write a key, or a name"),
    ):
        with pytest.raises(ConfigurationError, match=said) as raised:
            check(text)
        assert "sk-" not in str(raised.value)
    named = read_keys(["sk-a"], keys_file(tmp_path, "alice sk-a\nsk-a"), {})
    assert [key.name for key in named] == ["alice"]


def test_the_password_of_the_certificate() -> None:
    environment = {"MEGATRON_ASYNC_SSL_KEYFILE_PASSWORD": "b"}
    assert read_password("a", environment) == "a"
    assert read_password(None, environment) == "b"
    assert read_password(None, {}) is None
    assert without_keys(environment) == {}


def test_nothing_holds_a_key_itself(tmp_path: Path) -> None:
    keys = read_keys(["sk-secret"], None, {})
    assert "sk-secret" not in repr(keys)
    assert without_keys(
        {"MEGATRON_ASYNC_API_KEY": "a", "MEGATRON_ASYNC_ADMIN_KEY": "b", "C": "c"}
    ) == {"C": "c"}


@pytest.mark.parametrize("key", ["", "with space", "with\nnewline", "ümlaut", "x" * 513, "\x00"])
def test_a_key_that_no_header_carries(key: str) -> None:
    with pytest.raises(ConfigurationError, match="--api-key") as raised:
        read_keys([key], None, {})
    assert not key or key not in str(raised.value)
    with pytest.raises(ConfigurationError, match="--admin-key"):
        read_admin_key(key, {})


def test_a_file_that_others_read_or_nobody_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_keys([], keys_file(tmp_path, "sk-a", 0o644), {})
    with pytest.raises(ConfigurationError, match="line 2") as raised:
        read_keys([], keys_file(tmp_path, "sk-a\nthree words here"), {})
    assert "words" not in str(raised.value).split("line 2")[0]
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_keys([], str(tmp_path / "none"), {})
    many = "\n".join(f"sk-{number}" for number in range(MOST_KEYS + 1))
    with pytest.raises(ConfigurationError, match=str(MOST_KEYS)):
        read_keys([], keys_file(tmp_path, many), {})


def test_the_admin_key() -> None:
    assert read_admin_key(None, {}) is None
    given = read_admin_key("one", {"MEGATRON_ASYNC_ADMIN_KEY": "two"})
    inherited = read_admin_key(None, {"MEGATRON_ASYNC_ADMIN_KEY": "two"})
    assert given is not None
    assert inherited is not None
    assert given.sha256 == hashlib.sha256(b"one").hexdigest()
    assert inherited.sha256 == hashlib.sha256(b"two").hexdigest()
