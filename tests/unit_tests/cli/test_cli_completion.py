"""What TAB offers in bash, zsh and fish; the shells themselves ask the installed program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.cli import main as cli
from megatron_async.cli.completion import MODELS, SHELLS, VALUES, model_words
from megatron_async.cli.fields import field_options
from megatron_async.lab.simulate_command import machine_words

PROGRAM = Path(sys.executable).with_name("megatron-async")
DRIVERS = {
    "bash": 'source ./script; COMP_LINE="$1"; COMP_POINT=${#1}; COMP_TYPE=9\n'
    '_python_argcomplete megatron-async; printf "%s\\n" "${COMPREPLY[@]}"',
    # Outside of a line editor: the line is given, and what zsh would show is printed.
    "zsh": "compdef() { : }; _describe() { print -rl -- ${(P)2} }; source ./script\n"
    'BUFFER="$1"; CURSOR=${#1}; words=(megatron-async); _python_argcomplete',
    "fish": "source ./script; complete -C $argv[2]",
}
FLAGS = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}

Tab = Callable[[str], set[str]]


@pytest.fixture(params=SHELLS)
def tab(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tab:
    """What a shell offers behind a line, without descriptions, in a folder with two files."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert cli.main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "run.rec").touch()
    (tmp_path / "models--not-here").mkdir()
    path = {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def ask(line: str) -> set[str]:
        arguments = [shell, *FLAGS[shell], "-c", DRIVERS[shell], shell, line]
        done = subprocess.run(
            arguments, cwd=tmp_path, env={**os.environ, **path}, text=True, capture_output=True,
            check=False,
        )  # fmt: skip
        lines = (line.partition("\t")[0] for line in done.stdout.splitlines())
        # zsh's own form of a word and its help is "word:help", colons of the word escaped.
        if shell == "zsh":
            lines = (word.replace("\\:", "\0").partition(":")[0] for word in lines)
        return {word.replace("\0", ":").strip() for word in lines} - {""}

    return ask


def test_each_shell_offers_commands_options_choices_models_and_files(tab: Tab) -> None:
    assert tab("megatron-async gen") == {"generate"}
    assert {"chat", "bench", "completion"} <= tab("megatron-async ")
    assert tab("megatron-async generate --max-n") == {"--max-new-tokens"}
    assert tab("megatron-async generate smollm2 --dtype bf") == {"bfloat16"}
    assert tab("megatron-async generate --quantization ") == {"int8", "auto", "none"}
    assert tab("megatron-async chat smol") == {"smollm2"}
    assert any(word.endswith("tiny-moe") for word in tab("megatron-async chat dummy:tiny-m"))
    assert tab("megatron-async replay r") == {"run.rec"}
    assert not tab("megatron-async generate smollm2 --top-k ")
    assert not tab("megatron-async bench serve --model ")
    assert not any(word.startswith("-") for word in tab("megatron-async chat "))


def test_models_are_names_ids_in_the_cache_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub/models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "Qwen.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert model_words("Qw") == ["Qwen/Qwen3-0.6B", "Qwen.gguf"]
    assert model_words("dummy:mix") == ["dummy:mixtral-8x7b"]
    assert "h200:llama-3.1-8b" in machine_words("h200:")


def test_values_that_are_offered_are_accepted() -> None:
    sampling = field_options(SamplingParams)
    for name, values in VALUES.items():
        for value in values:
            if name in sampling:
                SamplingParams(**{name: value}).validate(vocab_size=100)
            else:
                others = {"enable_prefix_caching": False} if name == "invalidation" else {}
                InferenceConfig(**{name: value, **others})
    texts = {name for name, field in field_options(InferenceConfig).items() if field.kind is str}
    assert texts <= VALUES.keys()


def test_every_option_for_a_model_is_completed_as_one() -> None:
    options = [
        (command, action)
        for command in cli.build_parser()._subparsers._group_actions[0].choices.items()  # type: ignore[union-attr]
        for action in command[1]._actions
        if action.metavar in ("MODEL", "NAME_OR_PATH", "SOURCE")
    ]
    assert len(options) > 5
    assert {action.dest for _, action in options} <= set(MODELS)
