"""A whole service for tests: `megatron-async serve` and all of its processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.patience import PATIENCE_S, eventually

KEY = "sk-test"
ADMIN = "sk-admin"
ENGINE = (
    "--device", "cpu", "--block-size-tokens", "16", "--num-kv-blocks", "256", "--max-requests", "8",
    "--no-progress",
)  # fmt: skip


class Served:
    """`megatron-async serve ARGUMENTS`; use it with `with`. `lines` is what it has printed, `log`
    the file for what it says on stderr, `tls` for clients of a service with HTTPS."""

    def __init__(self, log: Path, *arguments: str, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        command = [sys.executable, "-m", "megatron_async", "serve", *arguments, "--port", "0"]
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, "--api-key", KEY, "--admin-key", ADMIN],
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        found = re.search(r"https?://127\.0\.0\.1:(\d+)", self.lines[0])
        assert found, (self.lines, log.read_text())
        self.port = int(found[1])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += self.process.stdout

    def wait_until_ready(self) -> None:
        eventually(lambda: any("ready after" in line for line in self.lines), "the model to load")

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        children = self.children("")
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def children(self, what: str) -> list[psutil.Process]:
        """Processes whose command line says that they are this: "api", "replica", or "" any."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if not what or what in child.cmdline():
                        found.append(child)
        return found

    def request(
        self,
        path: str,
        body: Any = None,
        key: str = KEY,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and body of an answer, decoded if it is JSON."""
        with contextlib.closing(self._connect()) as connection:
            self._send(connection, path, body, key, method, headers)
            answer = connection.getresponse()
            data = answer.read()
        is_json = (answer.getheader("content-type") or "").startswith("application/json")
        return answer.status, json.loads(data) if is_json and data else data.decode()

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The events of a streamed answer, without [DONE]."""
        with contextlib.closing(self._connect()) as connection:
            self._send(connection, path, {**body, "stream": True}, KEY, None)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
                elif line.startswith(b"data: "):
                    assert line == b"data: [DONE]\n"
                    return
        raise AssertionError("the stream ended without [DONE]")

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=PATIENCE_S, context=self._tls
        )

    @staticmethod
    def _send(
        connection: http.client.HTTPConnection,
        path: str,
        body: Any,
        key: str,
        method: str | None,
        more: dict[str, str] | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= more or {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait for its end; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def completion(tokens: int, **changes: Any) -> dict[str, Any]:
    """A request of the tiny model for so many tokens, always the same ones."""
    return {
        "model": "dummy:tiny", "prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 1.0,
        "seed": 7, "ignore_eos": True, "return_token_ids": True, **changes,
    }  # fmt: skip


def token_ids(events: list[Any]) -> list[int]:
    """All tokens of the first choice of a stream."""
    choices = [event["choices"][0] for event in events if event.get("choices")]
    return [token for choice in choices for token in choice.get("token_ids") or []]
