"""`megatron-async serve --coordinator`: HTTPS in front of a coordinator that asks for a secret, and
what administrators tell it."""

import asyncio
import contextlib
import shutil
import signal
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.server import api_process
from megatron_async.server.api_config import ApiConfig
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.replica import Replica
from tests.support.harness import TINY, make_engine, make_model
from tests.support.patience import PATIENCE_S, eventually
from tests.support.served import ADMIN, Served, completion, token_ids

SECRET = b"a secret of the whole service"
CONTROL = {"key": ADMIN, "method": "POST"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem and cert.pem of 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not there")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("front")
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    coordinator = Coordinator("tcp://127.0.0.1:*", secret=SECRET)
    engine = make_engine(make_model(TINY), lookahead=1, num_kv_blocks=600, max_sequence_length=4000)
    replica = Replica(engine, coordinator.address, "dummy:tiny", "a", secret=SECRET)
    threads = [
        threading.Thread(target=coordinator.run, daemon=True),
        threading.Thread(target=lambda: asyncio.run(replica.run()), daemon=True),
    ]
    for thread in threads:
        thread.start()
    tls = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    with Served(
        folder / "log", "--coordinator", coordinator.address, "--secret-file", str(secret),
        "--ssl-certfile", str(certificate / "cert.pem"), "--ssl-keyfile",
        str(certificate / "key.pem"), tls=tls,
    ) as served:  # fmt: skip
        eventually(lambda: served.request("/ready", key="")[0] == 200, "the front to be ready")
        yield served
    with CoordinatorClient(coordinator.address, secret=SECRET) as client:
        client.remove_replica("a")
    threads[1].join(PATIENCE_S)
    coordinator.stop()
    threads[0].join(PATIENCE_S)
    engine.close()


def test_https_in_front_of_a_secret(service: Served) -> None:
    assert f"https://127.0.0.1:{service.port}" in service.lines[0]
    _, whole = service.request("/v1/completions", completion(20))
    assert (
        token_ids(list(service.stream("/v1/completions", completion(20))))
        == (whole["choices"][0]["token_ids"])
    )
    with pytest.raises(OSError):  # it does not speak plain HTTP
        urllib.request.urlopen(f"http://127.0.0.1:{service.port}/health", timeout=PATIENCE_S)


def test_the_secret_is_asked_for(service: Served, tmp_path, monkeypatch, caplog):
    """An API process is asked; those of `service` have the right one."""
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"not the secret of that service")
    wrong.chmod(0o600)
    address = next(
        argument for argument in service.process.args if str(argument).startswith("tcp://")
    )  # type: ignore[union-attr]
    monkeypatch.setattr(api_process, "CONNECT_S", 0.5)
    config = ApiConfig(coordinator=str(address), secret_file=str(wrong))
    assert api_process.run_api_process(config, [-1]) == 1
    assert "If it has a secret" in caplog.text


def test_pause_lets_requests_wait(service: Served) -> None:
    stream = service.stream("/v1/completions", completion(400))
    first = next(stream)
    assert service.request("/pause", {}, **CONTROL)[0] == 200
    assert service.request("/ready", key="")[0] == 503
    assert service.request("/health", key="")[0] == 200
    assert service.request("/resume", **CONTROL)[0] == 200
    assert len(token_ids([first, *stream])) == 400
    assert service.request("/ready", key="")[0] == 200


def test_sleep_forgets_blocks_and_wake_goes_on(service: Served) -> None:
    before = service.request("/v1/completions", completion(5))[1]["choices"][0]["token_ids"]
    assert service.request("/sleep", **CONTROL)[0] == 200
    assert service.request("/wake", **CONTROL)[0] == 200
    assert service.request("/reset_prefix_cache", **CONTROL)[0] == 200
    after = service.request("/v1/completions", completion(5))[1]["choices"][0]["token_ids"]
    assert after == before


def test_an_answer_is_aborted_by_its_id(service: Served) -> None:
    stream = service.stream("/v1/completions", completion(3500))
    first = next(stream)
    assert service.request("/abort", {"id": first["id"]}, **CONTROL)[0] == 200
    events: list[Any] = [first, *stream]
    assert events[-1]["error"]["code"] == "aborted"
    assert len(token_ids(events)) < 3500


def test_an_administrator_watches_steps_and_whoever_asks_sees_counters(service: Served) -> None:
    stream = service.stream("/v1/completions", completion(1500))
    first = next(stream)
    assert service.request("/watch", {}, **CONTROL)[0] == 200  # from now on spans are made
    answer: dict[str, Any] = {}

    def seen() -> bool:
        nonlocal answer
        _, answer = service.request("/watch", {}, **CONTROL)
        (one,) = answer["replicas"].values()
        return {lane for lane, *_ in one["spans"]} == {0, 1}  # the CPU's, and the device's

    eventually(seen, "spans of both lanes")
    assert answer["state"] == "running"
    (looked,) = answer["replicas"].values()
    assert looked["slots_in_use"] == 1
    assert len(token_ids([first, *stream])) == 1500  # it changes nothing
    _, live = service.request("/live")
    (counted,) = live["replicas"].values()
    assert "spans" not in counted
    assert counted["lookahead"] == looked["lookahead"]


@pytest.mark.parametrize("verb", ["pause", "resume", "sleep", "wake", "drain", "abort", "move",
                                  "profile", "reset_prefix_cache", "watch"])  # fmt: skip
def test_only_administrators_may(service: Served, verb: str) -> None:
    assert service.request(f"/{verb}", {}, method="POST")[0] == 403
    assert service.request(f"/{verb}", {}, key="", method="POST")[0] == 401


@pytest.mark.parametrize(
    ("verb", "body", "part"),
    [
        ("abort", {}, "give the id"),
        ("move", {}, "the name of a replica"),
        ("move", {"id": "x", "replica": "y"}, "the name of a replica"),
        ("move", {"replica": "nobody"}, "no replica named 'nobody'"),
        ("pause", {"mode": "softly"}, "softly"),
        ("profile", {"action": "stop"}, "--profile-dir FOLDER"),
        ("profile", {"action": 5}, "action"),
    ],
)
def test_wrong_verbs(service: Served, verb: str, body: Any, part: str) -> None:
    status, answer = service.request(f"/{verb}", body, **CONTROL)
    assert 400 <= status < 500, answer
    assert (status == 404) == ("nobody" in body.values())
    assert part in answer["error"]["message"]


def test_a_second_signal_ends_at_once(service: Served) -> None:
    """The last test: it ends the service of the others; the coordinator is not the service's."""
    stream = service.stream("/v1/completions", completion(3500))
    next(stream)
    service.process.send_signal(signal.SIGTERM)
    eventually(lambda: "a second signal" in "".join(service.lines), "the first signal")
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    with contextlib.suppress(AssertionError, OSError):
        list(stream)
