"""`MegatronLLM` and `MegatronAsyncLLM` behind a coordinator, and their HTTP server."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import Status

from megatron_async.compat.inference.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_async.compat.inference.text_generation_server.dynamic_text_gen_server import (
    start_text_gen_server,
    stop_text_gen_server,
)
from megatron_async.errors import ConfigurationError
from tests.support.compat_trio import PROMPTS, compat_config, compat_engine, drive, greedy_params
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.patience import PATIENCE_S

TOKENS = 10


def arguments(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "model": model,
        "tokenizer": make_ascii_tokenizer(),
        "inference_config": compat_config(),
        "use_coordinator": True,
    }


@pytest.fixture
def expected(tiny_model: torch.nn.Module) -> Iterator[list[list[int]]]:
    with compat_engine(tiny_model) as engine:
        yield [r.generated_tokens for r in drive(engine, PROMPTS, greedy_params(TOKENS))]


def test_generate_and_control(tiny_model: torch.nn.Module, expected: list[list[int]]) -> None:
    with MegatronLLM(**arguments(tiny_model)) as llm:
        assert llm.is_primary_rank
        answers = llm.generate(list(PROMPTS), greedy_params(TOKENS))
        assert [answer.generated_tokens for answer in answers] == expected
        assert all(answer.status is Status.COMPLETED for answer in answers)
        llm.pause()
        assert llm.engine.state is EngineState.PAUSED
        llm.suspend()
        assert llm.engine.state is EngineState.SUSPENDED
        llm.resume()
        llm.unpause()
        assert llm.engine.state is EngineState.RUNNING
        (again,) = llm.generate(PROMPTS[1], greedy_params(TOKENS))
        assert again.generated_tokens == expected[1]
    llm.shutdown()
    llm.wait_for_shutdown()
    assert llm.engine.state is EngineState.STOPPED


def test_serve(tiny_model: torch.nn.Module, expected: list[list[int]]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def use() -> None:
        async with MegatronAsyncLLM(**arguments(tiny_model)) as llm:
            with pytest.raises(ConfigurationError, match="MEGATRON_ASYNC_API_KEY"):
                await llm.serve(ServeConfig(port=port), blocking=False)  # host 0.0.0.0
            with pytest.raises(ConfigurationError, match="no_such"):
                await llm.serve(ServeConfig("127.0.0.1", port, ["no_such"]), blocking=False)
            config = ServeConfig("127.0.0.1", port, frontend_replicas=1)
            await llm.serve(config, blocking=False)
            blocked = asyncio.ensure_future(llm.serve(config))  # warns: one runs
            prompt = make_ascii_tokenizer().tokenize(PROMPTS[0])
            said = await asyncio.to_thread(ask, port, prompt)
            text = make_ascii_tokenizer().detokenize(expected[0])
            assert said["choices"][0]["text"] == text
            answer = await llm.generate(PROMPTS[0], greedy_params(TOKENS))
            assert answer.generated_tokens == expected[0]
            assert not blocked.done()
        await blocked
        with pytest.raises(urllib.error.URLError):
            ask(port, prompt, attempts=1)

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def ask(port: int, prompt: list[int], attempts: int = 300) -> dict[str, Any]:
    """A completion by HTTP, once the server is there."""
    fields = {"model": "megatron", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(fields | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    for attempt in range(1, attempts + 1):
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            if error.code != 503 or attempt == attempts:
                raise AssertionError(error.read()) from error
        except urllib.error.URLError:
            if attempt == attempts:
                raise
        time.sleep(0.1)
    raise AssertionError("the server does not become ready")


def test_a_listening_socket_is_refused() -> None:
    with socket.socket() as sock, pytest.raises(ConfigurationError, match="sock"):
        start_text_gen_server("tcp://127.0.0.1:1", None, 0, 1, sock=sock)


@pytest.mark.parametrize(
    ("parsers", "told"),
    [
        (["deepseek-r1-reasoning", "qwen3-coder-tool"], ["--tool-parser", "qwen3-coder-tool"]),
        (["nemotron-v3", "qwen3-coder"], ["--tool-parser", "qwen3-coder"]),
        (["deepseek-r1-reasoning"], []),  # thoughts are always read
        (None, []),
    ],
)
def test_parsers_have_megatrons_names(
    parsers: list[str] | None, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class Ended:
        pid = 0

        def __init__(self, command: list[str]) -> None:
            commands.append(command)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Ended)
    start_text_gen_server("tcp://127.0.0.1:1", None, 0, 1, parsers=parsers, hostname="127.0.0.1")
    stop_text_gen_server()
    assert commands[0][-len(told) or len(commands[0]) :] == told
    assert ("--tool-parser" in commands[0]) == bool(told)
    for wrong in (["hermes", "mistral"], ["xlam"]):
        with pytest.raises(ConfigurationError, match=r"give one of them|there is no tool parser"):
            start_text_gen_server("tcp://127.0.0.1:1", None, 0, 1, parsers=wrong)
