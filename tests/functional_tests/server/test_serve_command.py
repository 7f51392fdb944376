"""`megatron-async serve`: its processes, their deaths, and its end."""

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async.cli import main as cli
from megatron_async.lab.arrival_trace import LengthDistribution, poisson_trace
from megatron_async.lab.http_trace import AnswerError, HttpReaders, HttpServer
from tests.support.open_sockets import listening, reachable
from tests.support.patience import PATIENCE_S, eventually
from tests.support.served import ADMIN, ENGINE, KEY, Served, completion, token_ids

LONG = 300


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with Served(
        log, "dummy:tiny", *ENGINE, "--replicas", "2", "--api-processes", "2", "--device", "cpu"
    ) as served:
        status, _ = served.request("/health", key="")
        assert status == 503  # nobody can have loaded a model yet
        assert served.request("/ready", key="")[0] == 503
        served.wait_until_ready()
        yield served


@pytest.fixture(scope="module")
def expected(service: Served) -> list[int]:
    _, answer = service.request("/v1/completions", completion(LONG))
    tokens: list[int] = answer["choices"][0]["token_ids"]
    assert len(tokens) == LONG
    return tokens


def in_thread(service: Served, tokens: int) -> tuple[threading.Thread, list[Any]]:
    """A stream that is read in a thread."""
    events: list[Any] = []

    def read() -> None:
        for event in service.stream("/v1/completions", completion(tokens)):
            events.append(event)

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: events, "the stream to begin")
    return thread, events


def test_it_says_where_it_is_and_how_to_ask(service: Served) -> None:
    text = "".join(service.lines)
    assert f"serving dummy:tiny at http://127.0.0.1:{service.port}" in text
    assert f"curl -N http://127.0.0.1:{service.port}/v1/completions" in text
    assert "sk-test" not in text + service.log.read_text()
    assert service.request("/health", key="")[0] == service.request("/ready", key="")[0] == 200


def test_each_request_has_one_line_of_log(service: Served) -> None:
    """With its id, which is also a header; of what it says nothing, not even in a refusal."""

    def lines(own_id: str) -> list[str]:
        return [line for line in service.log.read_text().splitlines() if f"id {own_id}," in line]

    for own_id, body, expected in (
        ("whole", completion(4), r"/v1/completions 200, id whole, key key-1, cmpl-\w+, 3 tokens "
         r"in, 4 out, first after \d+\.\d{3} s, end length, \d+\.\d{3} s"),
        ("stream", completion(5, stream=True), r".* 200, .*, 5 out, .*, end length, .*"),
        ("two", completion(3, n=2), r".* 3 tokens in, 6 out, .*"),
        ("wrong", completion(4, user="secret", seed=2**63), r".* 400, .* refused \(seed\), .*"),
    ):  # fmt: skip
        service.request("/v1/completions", body, headers={"X-Request-Id": own_id})
        eventually(lambda own_id=own_id: lines(own_id), "the line")
        (found,) = lines(own_id)
        assert re.fullmatch(r"[\d :,-]+ INFO api-[01]: " + expected, found)
    form = re.compile(
        r"\d{4}-\d\d-\d\d [\d:,]{12} [A-Z]+ (supervisor|coordinator|(api|replica)-\d): ."
    )
    assert all(form.match(line) for line in service.log.read_text().splitlines())
    assert form.match(service.lines[0])
    assert "secret" not in service.log.read_text()


def test_no_socket_is_open_to_others(service: Served) -> None:
    found = listening(psutil.Process(service.process.pid))
    assert set(found["tcp"]) == {f"127.0.0.1:{service.port}"}
    assert reachable(found) == []


def test_who_speaks_http_has_no_torch(service: Served) -> None:
    def has_torch(process: psutil.Process) -> bool:
        return any("libtorch" in each.path for each in process.memory_maps())

    assert len(service.children("api")) == 2
    assert not any(map(has_torch, service.children("api")))
    assert not has_torch(psutil.Process(service.process.pid))
    assert all(map(has_torch, service.children("replica")))


def test_keys_are_in_no_list_of_processes(service: Served) -> None:
    for process in service.children(""):
        assert not {"sk-test", ADMIN} & {*process.cmdline(), *process.environ().values()}


def test_a_replica_is_killed_and_its_request_goes_on(service: Served, expected: list[int]) -> None:
    threads = [in_thread(service, LONG) for _ in range(4)]
    service.children("replica")[0].kill()
    for thread, events in threads:
        thread.join(PATIENCE_S)
        assert token_ids(events) == expected
    eventually(lambda: len(service.children("replica")) == 2, "the replica to be started again")


def test_an_api_process_is_killed_and_others_go_on(service: Served, expected: list[int]) -> None:
    before = {process.pid for process in service.children("api")}
    streams = [in_thread(service, LONG)]
    # Whose connection it is, the kernel's table of sockets says.
    owners = {
        process.pid
        for process in service.children("api")
        if any(each.status == "ESTABLISHED" for each in process.net_connections("tcp"))
    }
    assert len(owners) == 1
    (victim,) = before - owners
    psutil.Process(victim).kill()
    for thread, events in streams:
        thread.join(PATIENCE_S)
        assert token_ids(events) == expected
    eventually(lambda: len(service.children("api")) == 2, "the API process to be started again")
    assert service.request("/v1/completions", completion(3))[0] == 200


def test_every_api_process_tells_the_same_numbers(service: Served) -> None:
    def counters() -> list[str]:
        status, text = service.request("/metrics")
        assert status == 200
        return sorted(
            line for line in text.splitlines()
            if line.startswith("megatron_async_service") or "ended_requests" in line
        )  # fmt: skip

    scrapes = [counters() for _ in range(6)]  # each a new connection, to either process
    assert len(scrapes[0]) > 10
    assert all(scrape == scrapes[0] for scrape in scrapes)


def test_a_stream_over_http_1_0_ends_with_its_connection(service: Served) -> None:
    """nginx asks so, if it is not told otherwise."""
    body = json.dumps(completion(5, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head.encode() + body)
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, events = data.decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    parts = events.removesuffix("\n\n").split("\n\n")
    assert parts[-1] == "data: [DONE]"
    ids = token_ids([json.loads(part.removeprefix("data: ")) for part in parts[:-1]])
    assert len(ids) == 5


def test_a_trace_is_served_and_timed(service: Served) -> None:
    lengths = LengthDistribution(8, 16), LengthDistribution(6, 12)
    trace = poisson_trace(30.0, 20, *lengths, 128, seed=0)
    url = f"http://127.0.0.1:{service.port}/v1"
    server = HttpServer(url, "dummy:tiny", KEY)
    with HttpReaders(2) as readers:
        found, seconds = readers.serve(server, trace)
        with pytest.raises(AnswerError, match=r"401"):
            readers.serve(HttpServer(url, "dummy:tiny", "sk-wrong"), trace[:1])
    assert [request.output_tokens for request in found] == [r.output_tokens for r in trace]
    assert seconds > trace[-1].arrival_s
    for request in found:
        assert 0 < request.ttft_s <= request.latency_s
        assert 1 <= request.events <= request.output_tokens + 1
        assert (request.tpot_s is None) == (request.output_tokens == 1)
    assert sum(r.events for r in found) > 0.8 * sum(r.output_tokens for r in found)


def test_bench_measures_a_server(service: Served, tmp_path, capsys):
    file, url = tmp_path / "b.json", f"http://127.0.0.1:{service.port}"
    asked = ["--num-prompts", "6", "--input-len", "4", "--output-len", "5", "--length-sigma", "0"]
    limits = ["--goodput", "ttft:60000", "tpot:60000", "--max-concurrency", "2"]
    command = ["bench", "serve", url, "--api-key", KEY, *asked, *limits]
    assert cli.main([*command, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["figures"]
    assert found["tokens_out_per_second"] * found["duration_s"] == pytest.approx(30)
    assert found["goodput_per_second"] == found["requests_per_second"]
    assert KEY not in file.read_text()
    assert "dummy:tiny at http://127.0.0.1:" in capsys.readouterr().out
    assert cli.main([*command, "--model", "other"]) == 2
    assert "--model other: " in capsys.readouterr().err


def test_nobody_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with Served(tmp_path / "log", "dummy:tiny", *ENGINE) as service:
        eventually(lambda: service.request("/health", key="")[0] == 503, "the API process")
        children = service.children("")
        assert len(children) == 2
        service.process.kill()
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert not alive


def test_sigterm_drains(service: Served) -> None:
    """The last test: it ends the service of the others."""
    before = len(service.log.read_text())
    long = 8 * LONG  # the questions below take some of its time
    thread, events = in_thread(service, long)
    service.process.send_signal(signal.SIGTERM)
    eventually(lambda: service.request("/ready", key="")[0] == 503, "/ready to say so")
    assert service.request("/v1/completions", completion(3))[0] == 503
    thread.join(PATIENCE_S)
    assert len(token_ids(events)) == long
    assert service.process.wait(PATIENCE_S) == 0
    log = service.log.read_text()
    assert "Traceback" not in log
    assert "A client is gone" not in log[before:]
