"""`python -m megatron_async.compat SCRIPT`, in a process of its own, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.compat.__main__ import parse
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
def test_a_command_line_without_a_script_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
