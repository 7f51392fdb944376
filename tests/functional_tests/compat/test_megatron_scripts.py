"""`python -m megatron_async.compat SCRIPT`, in a process of its own, as a user calls it: by changed
import and by the hook, beside Megatron's forward."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import Status

from megatron_async.compat.__main__ import parse
from megatron_async.compat.inference.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_async.compat.inference.text_generation_server.dynamic_text_gen_server import (
    start_text_gen_server,
    stop_text_gen_server,
)
from megatron_async.errors import ConfigurationError
from tests.support.compat_trio import PROMPTS, compat_config, compat_engine, drive, greedy_params
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[3]

SCRIPT = """
import json
import sys

import torch
from helper import DynamicInferenceContext, make_engine
from tests.support.compat_models import gpt_model, logits_of

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.sampling_params import SamplingParams


@torch.inference_mode()
def main():
    torch.cuda.reset_peak_memory_stats()
    model = gpt_model().eval()
    expected = []
    for prompt in ([3, 4, 5], [70] * 20):
        tokens = list(prompt)
        for _ in range(6):
            tokens.append(int(logits_of(model, tokens)[-1].argmax()))
        expected.append(tokens[len(prompt):])
    engine = make_engine(model)
    for number, prompt in enumerate(([3, 4, 5], [70] * 20)):
        engine.add_request(
            number, prompt, SamplingParams(num_tokens_to_generate=6, top_k=1, termination_id=-1)
        )
    found = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            request = record.merge()
            found[request.request_id] = request.generated_tokens
    torch.cuda.synchronize()
    small = torch.tensor([int(torch.cuda.max_memory_allocated())], device="cuda")
    theirs = sys.modules["megatron.core.inference.contexts"]
    print(json.dumps({
        "expected": expected,
        "found": [list(map(int, found[number])) for number in (0, 1)],
        "engine": DynamicInferenceEngine.__module__,
        "context": DynamicInferenceContext.__module__,
        "theirs": theirs.DynamicInferenceContext.__module__,
        "arguments": sys.argv[1:],
        "small": small.tolist(),
        "available": torch.cuda.is_available(),
    }))


if __name__ == "__main__":
    main()
"""
HELPER = """
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)


def make_engine(model):
    config = InferenceConfig(
        max_sequence_length=64, buffer_size_gb=0.01, block_size_tokens=16, max_tokens=64
    )
    context = DynamicInferenceContext(model.config, config)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), None)
    return DynamicInferenceEngine(controller, context)
"""


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_async.compat", *words],
        env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def test_an_unmodified_script_gives_the_tokens_of_megatrons_forward(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "serve.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "helper.py").write_text(HELPER)
    done = run("--cpu", str(script), "--prompt", "--cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["found"] == said["expected"]
    assert said["engine"] == "megatron_async.compat.inference.engines.dynamic_engine"
    assert said["context"] == "megatron_async.compat.inference.contexts.dynamic_context"
    assert said["theirs"].startswith("megatron.core.inference.")
    assert said["arguments"] == ["--prompt", "--cpu"]  # the script's, not ours
    assert said["small"] == [0] or said["available"]


def test_a_scripts_error_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import sys\nsys.exit(3)\n")
    assert run(str(tmp_path / "wrong.py"), folder=tmp_path).returncode == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such.py"], "no such script: no_such.py"),
        ([], "required: SCRIPT"),
        (["--cqu", "x.py"], "--cqu"),
    ],
)
def test_a_command_line_without_a_script_is_refused(words: list[str], message: str, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_says_what_the_options_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("--cpu", "--own NAME", "--no-hook", "SCRIPT"))


def test_options_before_the_script_are_ours(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    words = ["--own", "mine", "--cpu", "--own", "nemo", str(script), "--own", "theirs", "a b"]
    options, found, arguments = parse(words)
    assert (options.own, options.cpu, options.no_hook) == (["mine", "nemo"], True, False)
    assert (found, arguments) == (script, ["--own", "theirs", "a b"])


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "megatron_script.py"
RUNS = """
import contextlib, io, json, runpy, sys
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_async.compat.__main__ import main as by_hook
from megatron_async.compat.cpu_stand_ins import stand_in

changed, own = sys.argv[1:]
stand_in()

def greedy(model, letters):
    tokens = letters.tokenize("The sea")
    with torch.no_grad():
        for _ in range(16):
            ids, length = torch.tensor([tokens]), len(tokens)
            mask = torch.ones(1, 1, length, length).tril() < 0.5
            logits = model.eval()(ids, torch.arange(length)[None], mask)
            tokens.append(int(logits[0, -1].argmax()))
    return letters.detokenize(tokens[-16:])

def forget():
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()

def printed(run):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run()
    forget()
    return out.getvalue().splitlines()

script = runpy.run_path(changed)
model = script["make_model"]()
truth = [greedy(model, script["LETTERS"])]
loss = script["train_step"](model.train(), "The sea is wide. " * 3)
truth.append(greedy(model, script["LETTERS"]))
forget()
found = [printed(lambda: runpy.run_path(changed, run_name="__main__"))]
found.append(printed(lambda: by_hook(["--cpu", own])))
print(json.dumps({"truth": truth, "loss": loss, "found": found}))
"""


def test_the_example(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    text = EXAMPLE.read_text().replace("megatron_async.compat.inference", "megatron.core.inference")
    assert "megatron.core.inference.apis" in text
    own.write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", RUNS, str(EXAMPLE), str(own)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    before, after = told["truth"]
    assert before != after
    for lines in told["found"]:
        assert lines[0] == f"before: {before!r}"
        assert lines[1] == f"loss:   {round(told['loss'], 2)}"
        assert lines[2] == f"after:  {after!r}"


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


def test_a_socket_without_a_port_is_refused() -> None:
    with socket.socket() as sock, pytest.raises(ConfigurationError, match="is no bound TCP socket"):
        start_text_gen_server("tcp://127.0.0.1:1", None, 0, 1, sock=sock)


@pytest.mark.parametrize(
    ("parsers", "told"),
    [
        (
            ["deepseek-r1-reasoning", "qwen3-coder-tool"],
            ["--reasoning-parser", "deepseek-r1-reasoning", "--tool-parser", "qwen3-coder-tool"],
        ),
        (["nemotron-v3"], ["--reasoning-parser", "nemotron-v3"]),
        (["qwen3-coder"], ["--tool-parser", "qwen3-coder"]),
        (None, []),
    ],
)
def test_parsers_have_megatrons_names(parsers: list[str] | None, told: list[str], monkeypatch):
    commands: list[list[str]] = []

    class Ended:
        pid = 0

        def __init__(self, command: list[str], pass_fds: tuple[int, ...], env: Any) -> None:
            assert pass_fds == ()
            commands.append(command)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Ended)
    start_text_gen_server("tcp://127.0.0.1:1", None, 0, 1, parsers=parsers, hostname="127.0.0.1")
    stop_text_gen_server()
    assert [word for word in commands[0] if word in told or word.endswith("-parser")] == told
    for wrong in (["hermes", "mistral"], ["xlam"], ["nemotron-v3", "deepseek-r1-reasoning"]):
        with pytest.raises(ConfigurationError, match=r"give one of them|there is no tool parser"):
            start_text_gen_server("tcp://127.0.0.1:1", None, 0, 1, parsers=wrong)
