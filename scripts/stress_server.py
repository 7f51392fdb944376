"""Two ways to be unkind to a running server: requests that are wrong, and readers that stall.

    megatron-async serve smollm2 --port 8000
    python scripts/stress_server.py malformed --url http://127.0.0.1:8000 --count 100000
    python scripts/stress_server.py stall --url http://127.0.0.1:8000 --connections 1000

`malformed` sends requests that each have a fault for sure, drawn from a list for every field and
from broken JSON, and wants each to be answered by a status from 400 to 499, and good ones between
them to be served. `stall` opens streams of which half are never read, and wants the others'
pace to stay what it is without them. Both read raw sockets: no client hides a fault.
"""

import argparse
import http.client
import json
import os
import random
import selectors
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

NUMBERS_FAULTS: list[Any] = ["warm", [], {}, True, [1.0], -1e308]
FAULTS: dict[str, list[Any]] = {
    "model": [5, [], "no such model", "", "\x00"],
    "max_tokens": [-1, -(10**30), 1.5, "5", [], {}],
    "temperature": [*NUMBERS_FAULTS, -0.1],
    "top_p": [*NUMBERS_FAULTS, -0.1, 1.1],
    "top_k": ["1", -2, 1.5, [], {}],
    "min_p": [*NUMBERS_FAULTS, -0.1, 1.1],
    "n": [0, -1, 10**9, 10**30, "1", 1.5, [], {}],
    "seed": ["1", 1.5, [], {}, 2**200],
    "presence_penalty": [*NUMBERS_FAULTS, 2.1, -2.1],
    "frequency_penalty": [*NUMBERS_FAULTS, 2.1, -2.1],
    "repetition_penalty": [*NUMBERS_FAULTS, -1.0],
    "stop": [5, [5], {}, [["a"]], ["x"] * 10_000],
    "stop_token_ids": ["1", ["1"], {}, [1.5]],
    "logit_bias": [5, [], {"a": 1}, {"5": "x"}, {"5": []}, {"-1": 1}, {"5": 1e308}],
    "stream": ["yes", 5, [], {}],
    "stream_options": [5, "x", []],
    "ignore_eos": ["yes", [], {}],
    "min_tokens": ["1", -1, 1.5, []],
    "priority": ["1", 1.5, [], {}],
    "response_format": [5, "json", [], {"type": "xml"}, {"type": "json_schema"}],
    "structured_outputs": [5, [], {"regex": "("}, {"json": 5, "regex": "a"}],
}
"""For every field of both endpoints values that no server may take."""
OF_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [5, {}, [], "", None, [[]], [1, "a"], [-1], [10**9], [1.5], [[1], "a"], [None]],
    "logprobs": [-1, 10**6, "1", 1.5, {}],
    "echo": ["yes", 5, []],
}
OF_CHAT: dict[str, list[Any]] = {
    "messages": [
        5, {}, [], "hello", [5], [{}], [{"role": "<|im_start|>", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
    "logprobs": [5, "yes", []],
    "top_logprobs": [-1, 10**6, "1", 1.5],
    "tools": [5, "x", [5], [{}], [{"type": "function"}]],
    "tool_choice": [5, "maybe", [], {"type": "function"}],
    "chat_template": ["{{ 1 }}", "{% for i in range(10**9) %}{% endfor %}"],
}  # fmt: skip


def draw(chance: random.Random, model: str) -> tuple[str, bytes]:
    """A request with a fault: its path and body."""
    is_chat = chance.random() < 0.5
    path = CHAT if is_chat else COMPLETIONS
    body: dict[str, Any] = {"model": model, "max_tokens": 1}
    if is_chat:
        body["messages"] = [{"role": "user", "content": "x"}]
    else:
        body["prompt"] = [1, 2]
    faults = FAULTS | (OF_CHAT if is_chat else OF_COMPLETIONS)
    for field in chance.sample(sorted(faults), chance.choice((1, 1, 1, 2, 5))):
        body[field] = chance.choice(faults[field])
    data = json.dumps(body).encode()
    if chance.random() < 0.2:
        data = broken(chance, data)
    return path, data


def broken(chance: random.Random, data: bytes) -> bytes:
    """A body that is no JSON."""
    match chance.randrange(6):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            return data + b"}"
        case 2:
            return b"[" * chance.randrange(1, 100_000)
        case 3:
            return b'{"prompt": "\xff\xfe"}'
        case 4:
            return chance.randbytes(chance.randrange(1, 200))
        case _:
            return data.replace(b":", b"", 1)


class Asker:
    """One connection at a time, kept while the server keeps it."""

    def __init__(self, url: str, key: str) -> None:
        place = urlsplit(url)
        self._place = (place.hostname or "127.0.0.1", place.port or 80)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self._place, timeout=60)
        try:
            self._connection.request("POST", path, body, self._headers)
            answer = self._connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self._connection = None
            raise
        if answer.will_close:
            self._connection.close()
            self._connection = None
        return answer.status, data


def run_malformed(arguments: argparse.Namespace) -> int:
    """Send faults from several threads; 1 if one was answered otherwise than by 4xx."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    good = json.dumps({"model": arguments.model, "prompt": [1, 2], "max_tokens": 1}).encode()

    def work(number: int) -> None:
        chance = random.Random(arguments.seed * 1000 + number)
        asker = Asker(arguments.url, arguments.key)
        for turn in range(arguments.count // arguments.threads):
            path, body = draw(chance, arguments.model)
            try:
                status, answer = asker.ask(path, body)
            except (OSError, http.client.HTTPException) as error:
                wrong.append(f"{path} {body[:300]!r}: {error!r}")
                continue
            statuses[status] += 1
            has_error = b'"error"' in answer
            if not 400 <= status < 500 or not has_error:
                wrong.append(f"{path} {body[:300]!r}: {status} {answer[:200]!r}")
            if turn % 1000 == 0:
                status, answer = asker.ask(COMPLETIONS, good)
                if status != 200:
                    wrong.append(f"a good request: {status} {answer[:200]!r}")

    start = time.monotonic()
    _in_threads(arguments.threads, work)
    seconds = time.monotonic() - start
    print(f"{sum(statuses.values())} requests in {seconds:.1f} s: {dict(sorted(statuses.items()))}")
    for line in wrong[:20]:
        print(line)
    print(f"{len(wrong)} were answered otherwise than by 4xx and an error object")
    return 1 if wrong else 0


def run_stall(arguments: argparse.Namespace) -> int:
    """Measure the pace of readers alone, then beside as many that stall."""
    half = arguments.connections // 2
    alone = measure(arguments, half, 0)
    print(f"{half} readers alone: {alone:.0f} tokens/s")
    beside = measure(arguments, half, half)
    print(f"{half} readers beside {half} that stall: {beside:.0f} tokens/s")
    ratio = beside / alone
    print(f"ratio {ratio:.2f} (wanted: at least {arguments.least})")
    return 0 if ratio >= arguments.least else 1


def measure(arguments: argparse.Namespace, readers: int, stalled: int) -> float:
    """Events a second that `readers` streams get together, while `stalled` others are not read."""
    idle = [_open_stream(arguments, buffer=4096) for _ in range(stalled)]
    selector = selectors.DefaultSelector()
    for _ in range(readers):
        connection = _open_stream(arguments)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    events, start, first = 0, time.monotonic(), 0.0
    rates: list[float] = []
    while (now := time.monotonic()) - start < arguments.seconds:
        for key, _ in selector.select(0.1):
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            if not data:
                selector.unregister(key.fileobj)
            events += data.count(b"data: {")
        first = first or (now if events else 0.0)
        if first and now - start > (len(rates) + 1) * 1.0:
            rates.append(events)
    for key in list(selector.get_map().values()):
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
    for connection in idle:
        connection.close()
    time.sleep(2.0)  # what they asked for is aborted
    steps = [late - early for early, late in pairwise(rates)]
    return statistics.median(steps) if steps else 0.0


def _open_stream(arguments: argparse.Namespace, buffer: int = 0) -> socket.socket:
    place = urlsplit(arguments.url)
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.connect((place.hostname, place.port))
    body = json.dumps(
        {
            "model": arguments.model, "prompt": [1, 2, 3], "max_tokens": arguments.tokens,
            "ignore_eos": True, "stream": True,
        }
    ).encode()  # fmt: skip
    connection.sendall(
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer "
        f"{arguments.key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "\r\n".encode()
        + body
    )
    return connection


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    """Run one of both; 0 if the server bore it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    malformed, stall = commands.add_parser("malformed"), commands.add_parser("stall")
    for command in (malformed, stall):
        command.add_argument("--url", default="http://127.0.0.1:8000")
        command.add_argument("--model", default="smollm2")
        command.add_argument("--key", default=os.environ.get("API_KEY", "none"))
    malformed.add_argument("--count", type=int, default=100_000)
    malformed.add_argument("--threads", type=int, default=4)
    malformed.add_argument("--seed", type=int, default=0)
    stall.add_argument("--connections", type=int, default=1000)
    stall.add_argument("--tokens", type=int, default=2000)
    stall.add_argument("--seconds", type=float, default=10.0)
    stall.add_argument("--least", type=float, default=0.9)
    arguments = parser.parse_args()
    return run_malformed(arguments) if arguments.what == "malformed" else run_stall(arguments)


if __name__ == "__main__":
    sys.exit(main())
