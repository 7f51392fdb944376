"""Megatron-LM's server examples, run unmodified and asked over HTTP for what `LLM` says."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from upstream.example_runs import PROMPTS, TOKENS, Example, command
from upstream.processes import environment

SERVERS = (
    "examples/inference/launch_inference_server.py",
    "tools/run_dynamic_text_generation_server.py",
)
END_S = 30.0


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_server(
    checkout: Path, script: str, folder: Path, flags: list[str], cpu: bool, timeout_s: float,
    expected: list[str],
) -> list[str]:  # fmt: skip
    """Start a server script, complete each of `PROMPTS` by HTTP, and end it by SIGINT.

    Args:
        checkout, folder, flags, cpu: as of `command`.
        script: its path in the checkout.
        timeout_s: until it answers.
        expected: texts of `LLM` after the prompts, greedy.

    Returns:
        what is wrong.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        example = Example(script, ("--host", "127.0.0.1", "--port", str(port)), prompts=())
        words = command(checkout, example, folder, flags, cpu, Path(place) / "unused")
        words.remove("--prompts")
        with log.open("wb") as output:
            server = subprocess.Popen(
                words, env=environment(), cwd=place, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            wrong = []
            for prompt, text in zip(PROMPTS, expected, strict=True):
                found = _ask(server, port, prompt, timeout_s)
                if found != text:
                    wrong.append(f"{prompt!r}: {found!r}, not {text!r}")
        except (OSError, TimeoutError) as error:
            wrong = [f"{error}\n" + "\n".join(log.read_text().splitlines()[-25:])]
        finally:
            server.send_signal(2)
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
                wrong = [*wrong, f"it does not end within {END_S:g} s of SIGINT"]
    return wrong


def _ask(server: subprocess.Popen[bytes], port: int, prompt: str, timeout_s: float) -> str:
    """The text after a prompt, once the server is there."""
    fields = {"model": "megatron", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(fields).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return str(json.load(reply)["choices"][0]["text"])
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise OSError(f"status {error.code}: {error.read()!r}") from error
        except urllib.error.URLError:
            pass
        if server.poll() is not None:
            raise OSError(f"the server ended with status {server.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        time.sleep(0.2)
