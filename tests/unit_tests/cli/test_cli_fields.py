"""Options come from the fields of dataclasses: none is forgotten, and TAB and help say what the
fields say."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.cli import main as cli
from megatron_async.cli import options
from megatron_async.cli import sampling_options as sampling
from megatron_async.cli.completion import MODELS, SHELLS, VALUES, model_words
from megatron_async.cli.fields import add_fields, field_options
from megatron_async.cli.main import build_parser
from megatron_async.lab.simulate_command import machine_words
from megatron_async.requests.defaults import default_sampling_params, generation_defaults


@dataclass
class Made:
    """An example."""

    tea_gb: float | None = None
    """Memory for tea, in GiB. Further words. None: as `much_tea` says. More."""
    much_tea: int = 3
    """Cups."""
    is_hot: bool = True
    """Whether it is hot (40 % or more)."""
    kinds: list[str] | None = None
    """Kinds of tea."""
    pot: dict[str, int] | None = None
    """No option can say it."""


def test_help_is_the_first_sentence_and_the_default() -> None:
    found = field_options(Made)
    assert {name: field.help for name, field in found.items()} == {
        "tea_gb": "memory for tea, in GiB (default: as --much-tea says)",
        "much_tea": "cups (default: 3)",
        "is_hot": "whether it is hot (40 %% or more) (default: on)",
        "kinds": "kinds of tea",
    }
    assert [found[name].metavar for name in ("tea_gb", "much_tea")] == ["GB", "N"]


def test_what_is_not_given_is_none() -> None:
    parser = argparse.ArgumentParser()
    add_fields(parser, Made, field_options(Made), {"much_tea": "all"})
    assert vars(parser.parse_args([])) == dict.fromkeys(field_options(Made))
    given = parser.parse_args(["--tea-gb", "2", "--no-is-hot", "--kinds", "a", "--kinds", "b"])
    assert (given.tea_gb, given.is_hot, given.kinds) == (2.0, False, ["a", "b"])
    assert "cups (default: all)" in parser.format_help()
    assert "40 % or more" in parser.format_help()


def test_every_field_is_an_option_or_says_why_not() -> None:
    of_engine = {*options.engine_fields(), *options.NOT_OPTIONS}
    assert {field.name for field in fields(InferenceConfig)} == of_engine
    of_request = {*sampling.FIELDS, *sampling.REPEATED, *sampling.BY_OTHER_NAMES}
    assert {field.name for field in fields(SamplingParams)} == of_request


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "replica"])
def test_options_that_are_not_given_leave_the_engine_its_defaults(command: str) -> None:
    arguments = build_parser().parse_args([command, "dummy:tiny"])
    assert options.engine_options(arguments) == {}
    words = ["--no-chunked-prefill", "--lookahead", "0", "--num-state-snapshots", "7"]
    given = options.engine_options(build_parser().parse_args([command, "dummy:tiny", *words]))
    assert given == {"enable_chunked_prefill": False, "lookahead": 0, "num_state_snapshots": 7}
    assert InferenceConfig(**given).lookahead == 0


def test_sampling_options() -> None:
    words = "--top-p 0.9 --temperature 1 --stop-word a --stop-word b --logprobs-mode processed"
    given = sampling.given_sampling(build_parser().parse_args(["generate", "m", *words.split()]))
    found = default_sampling_params(generation_defaults(None), **given)
    assert found == SamplingParams(
        top_p=0.9, stop_words=["a", "b"], logprobs_mode="processed", num_tokens_to_generate=256
    )


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
    known = {"file", "fp8", "int8", "auto", "none"}
    assert tab("megatron-async generate --quantization ") == known
    assert tab("megatron-async chat smol") == {"smollm2"}
    assert any(word.endswith("tiny-moe") for word in tab("megatron-async chat dummy:tiny-m"))
    assert tab("megatron-async replay r") == {"run.rec"}
    assert not tab("megatron-async generate smollm2 --top-k ")
    assert not tab("megatron-async bench serve --model ")
    assert not any(word.startswith("-") for word in tab("megatron-async chat "))


def test_models_are_names_ids_in_the_cache_and_files(tmp_path, monkeypatch):
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
