"""What `serve` refuses before anything starts, what it hands on to its children, and keys of the
API."""

import hashlib
import json
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_async.cache_folders import SERVICE_VARIABLE
from megatron_async.cli.main import build_parser
from megatron_async.cli.serve import read_settings
from megatron_async.errors import ConfigurationError
from megatron_async.server.supervisor.devices import share_gpus, visible_gpus
from megatron_async.server.supervisor.keys import (
    MOST_KEYS,
    read_admin_key,
    read_keys,
    read_password,
    without_keys,
)
from megatron_async.server.supervisor.listener import listen, url_of
from megatron_async.server.supervisor.serve_settings import (
    ServeSettings,
    api_config,
    curl_line,
    replica_command,
    served_name,
)
from megatron_async.server.supervisor.service import Supervisor


@pytest.fixture(autouse=True)
def _no_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGATRON_ASYNC_API_KEY", "MEGATRON_ASYNC_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_replicas_share_a_folder_for_what_they_choose() -> None:
    """A new one for each service, which other users do not reach."""
    found = []
    for _ in range(2):
        supervisor = Supervisor(settings("m --port 0 --replicas 3 --device cpu"), str)
        with supervisor._stack:
            supervisor._prepare()[0].close()
            environments = [each._environment or {} for each in supervisor._replicas]
            (folder,) = {environment[SERVICE_VARIABLE] for environment in environments}
            assert len(environments) == 3
            assert Path(folder).parent.stat().st_mode & 0o77 == 0
        found.append(folder)
    assert found[0] != found[1]


def settings(line: str) -> Any:
    return read_settings(build_parser().parse_args(["serve", *shlex.split(line)]))


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("m --host 0.0.0.0", "--api-key-file"),
        ("m --host ::", "--api-key-file"),
        ("m --host 10.1.2.3", "--api-key-file"),
        ("m --host no.such.host.invalid", "no address"),
        ("", "--coordinator"),
        ("m --coordinator tcp://127.0.0.1:9500", "exclude each other"),
        ("--coordinator tcp://127.0.0.1:9500 --max-requests 5", "--max-requests"),
        ("m --secret-file x", "--coordinator"),
        ("m --api-processes 0", "--api-processes 0"),
        ("m --replicas 65", "--replicas 65"),
        ("m --shutdown-timeout nan", "--shutdown-timeout"),
        ("m --root-path llm", "slash"),
        ("m --root-path /llm/", "slash"),
        ("m --ssl-keyfile x", "--ssl-certfile"),
        ("m --ssl-certfile /none", "no such file"),
        ("m --api-key same --admin-key same", "value of its own"),
        ("m --served-model-name ''", "--served-model-name"),
        ("m --profile-dir /none", "--profile-dir"),
        ("m --max-body-mb 0", "--max-body-mb"),
        ("m --max-unfinished 0", "max_unfinished"),
        ("m --policy best", "best"),
    ],
)
def test_what_cannot_work_is_said_at_once(line: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        settings(line)


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("nothing")
    with pytest.raises(ConfigurationError, match="PEM"):
        settings(f"m --ssl-certfile {file}")


def test_only_megatrons_server_is_open_without_a_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = "m --device cpu --port 0 --host 0.0.0.0"
    with pytest.raises(ConfigurationError, match="set MEGATRON_ASYNC_OPEN_SERVER=1"):
        settings(f"{line} --as-megatron")
    monkeypatch.setenv("MEGATRON_ASYNC_OPEN_SERVER", "yes")
    with pytest.raises(ConfigurationError, match="'yes' must be 1, 0"):
        settings(f"{line} --as-megatron")
    monkeypatch.setenv("MEGATRON_ASYNC_OPEN_SERVER", "1")
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1\.$"):
        settings(line)
    supervisor = Supervisor(settings(f"{line} --as-megatron"), str)
    with supervisor._stack:
        supervisor._prepare()
    assert "can use the model: no key is set" in caplog.text


def test_an_inherited_socket_is_where_it_is_bound() -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        line = f"m --fd {open_to_all.fileno()}"
        with pytest.raises(ConfigurationError, match=r"--fd \d+ is reached from other hosts"):
            settings(line)
        assert settings(f"{line} --api-key sk-a").is_exposed
    with socket.create_server(("127.0.0.1", 0)) as bound:
        found = settings(f"m --fd {bound.fileno()}")
        assert not found.is_exposed
        with listen(found.host, found.port, fd=found.listener_fds[0]) as listener:
            assert listener.getsockname() == bound.getsockname()
            listener.detach()  # the caller's
    with socket.socket() as unbound, pytest.raises(ConfigurationError, match="has no port"):
        settings(f"m --fd {unbound.fileno()}")
    with pytest.raises(ConfigurationError, match="is no bound TCP socket"):
        settings("m --fd 999999")


def test_a_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert settings(f"m --chat-template @{tmp_path}/own.jinja").chat_template == "{{ messages }}"
    assert settings("m --chat-template '{{ 1 }}'").chat_template == "{{ 1 }}"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        settings("m --chat-template @/no/such")


def test_with_a_key_others_may_come() -> None:
    found = settings("m --host 0.0.0.0 --api-key sk-a")
    assert found.is_exposed
    config = api_config(found, "ipc://x")
    assert config.allowed_hosts == ("*",)
    assert len(config.keys) == 1
    assert not settings("m --host localhost").is_exposed
    assert api_config(settings("m"), "ipc://x").allowed_hosts == ()


def test_a_replica_gets_the_options_of_its_command() -> None:
    found = settings(
        "dummy:tiny --device cpu --max-requests 4 --no-enable-prefix-caching --dtype float32 "
        "--no-progress --tensor-model-parallel-size 2"
    )
    words = replica_command(found, "replica-0", "ipc:///x/c", Path("/x"))
    assert words[:3] == ("ranks", "2", "/x")
    arguments = build_parser().parse_args(["replica", *words[3:]])
    assert (arguments.model, arguments.name, arguments.coordinator) == (
        "dummy:tiny", "replica-0", "ipc:///x/c",
    )  # fmt: skip
    assert (arguments.device, arguments.max_requests, arguments.dtype) == ("cpu", 4, "float32")
    assert arguments.enable_prefix_caching is False
    assert arguments.no_progress
    assert arguments.tensor_model_parallel_size == 2
    assert replica_command(settings("dummy:tiny"), "r", "ipc://x", Path("/x"))[0] == "replica"


def test_names_do_not_tell_where_models_lie(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    file = tmp_path / "small.gguf"
    file.touch()
    assert served_name(str(folder)) == "my-llama"
    assert served_name(f"{folder}/") == "my-llama"
    assert served_name(str(file)) == "small"
    assert served_name("dummy:tiny") == "dummy:tiny"
    assert served_name("smollm2") == "smollm2"
    assert api_config(settings("m --served-model-name a b"), "x").served_names == ("a", "b")
    assert api_config(settings("--coordinator tcp://h:1"), "tcp://h:1").served_names == ()


def test_the_line_to_try_is_a_command() -> None:
    found = settings('"it\'s" --root-path /llm --api-key sk-a')
    words = shlex.split(curl_line(found, "http://127.0.0.1:8000").replace("\\\n", " "))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/llm/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "it's"
    assert body["stream"] is True
    assert 0 < body["max_tokens"] < 500
    assert "Authorization: Bearer KEY" in words
    assert "sk-a" not in words
    tokens = curl_line(settings("dummy:tiny"), "http://h:1")
    assert '"prompt": [1, 2, 3]' in tokens


def test_gpus_are_shared_out() -> None:
    gpus = ["0", "1", "2", "3"]
    assert share_gpus(gpus, 1, 1, None) == [{}]
    assert share_gpus([], 3, 2, None) == [{}, {}, {}]
    assert share_gpus(gpus, 3, 2, "cpu") == [{}, {}, {}]
    assert share_gpus(gpus, 2, 2, "cuda") == [
        {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="5 GPUs, and there are 4"):
        share_gpus(gpus, 5, 1, None)
    with pytest.raises(ConfigurationError, match="--device cuda:1"):
        share_gpus(gpus, 2, 1, "cuda:1")


def test_gpus_are_those_of_the_environment_or_of_the_driver(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "2", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, tmp_path) == ["GPU-a", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_a_port_in_use() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert url_of(first, True) == f"https://127.0.0.1:{port}"
        with pytest.raises(ConfigurationError, match="in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigurationError, match="no such address"):
        listen("192.0.2.1", 0)
    if socket.has_ipv6:
        try:
            with listen("::1", 0) as listener:
                assert url_of(listener, False).startswith("http://[::1]:")
        except ConfigurationError:
            pytest.skip("this host has no IPv6")


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
