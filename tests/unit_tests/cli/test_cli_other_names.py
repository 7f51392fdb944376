"""Options and commands of other tools are answered with what they are called here."""

from __future__ import annotations

import argparse
import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_async.cli.main import build_parser, main
from megatron_async.cli.option_names import COMMANDS, ELSEWHERE, SHORT, in_options, option_meant

OPTION = re.compile(r"(?<![\w`-])--[a-z][a-z-]+")


OF_OTHER_VERSIONS = (
    "async-scheduling", "finished-sync-period", "chunk-size", "active-buffer-size-gb",
    "mamba-triton-conv1d", "buffer-guaranteed-fraction", "buffer-overflow-factor",
    "max-requests-override", "max-tokens-override",
)  # fmt: skip
OF_ITS_SCRIPTS = (
    "--flash-decode", "--inference-rng-tracker", "--inference-flask-server-logging", "--load",
    "--params-dtype", "--bf16", "--fp16", "--tokenizer-model", "--output-path", "--prompts",
    "--cache-mla-latent", "--persist-cuda-graphs", "--offload-kv-cache",
)  # fmt: skip


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run smollm2", "there is no command 'run'. Did you mean chat?"),
        ("chta", "Did you mean chat?"),
        ("pull Qwen/Qwen3-0.6B", "is fetched when it is first named"),
        ("zzzz", "The commands are: chat, generate"),
        ("--verison", "Did you mean --version?"),
        ("generate --temprature 1 smollm2", "option --temprature. Did you mean --temperature?"),
        ("generate smollm2 -p x --max-tokens 5", "-n (--max-new-tokens) is the length of an answer,"
         " and --max-step-tokens the budget of one step"),
        ("serve smollm2 --max-tokens=5", "--max-step-tokens the budget of one step"),
        ("serve smollm2 --max-model-len 5", "Here that is --max-sequence-length"),
        ("serve smollm2 --max_sequence_length 5", "Did you mean --max-sequence-length?"),
        ("serve smollm2 --gpu-memory-utilization .9", "Here that is --buffer-size-gb (GiB"),
        ("serve smollm2 --async-sched-mode async", "Here that is --lookahead"),
        ("serve smollm2 --nvtx-ranges", "Here that is --nvtx"),
        ("serve smollm2 --inference-dynamic-batching-async-scheduling", "that is --lookahead 1"),
        ("serve smollm2 --inference-dynamic-batching-max-tokens 9", "mean --max-step-tokens?"),
        ("serve smollm2 -tp 2", "Here that is --tensor-model-parallel-size"),
        ("serve --model smollm2", "The model's name stands by itself"),
        ("serve smollm2 --temperature 1", "each request says it"),
        ("serve smollm2 --disable-radix-cache", "Here that is --no-enable-prefix-caching"),
        ("generate smollm2 -p x --return-log-probs", "Here that is --log-probs (see"),
        ("generate smollm2 -p x --stop-words x", "Here that is --stop-word (see"),
        ("generate smollm2 -p x --skip-prompt-log-probs", "--log-probs without --prompt-log-probs"),
        ("generate smollm2 --prompts Hello", "Here that is --prompt (see"),
        ("serve smollm2 --stop-words x", "each request says it, not the command"),
        ("serve smollm2 --inference-dynamic-batching-logprobs-mode raw", "request says it (se"),
        ("serve smollm2 --expert-tensor-parallel-size 2", "split as the rest is"),
        ("serve smollm2 --inference-dynamic-batching-active-buffer-size-gb 2", "--buffer-size-gb"),
        ("serve smollm2 --inference-dynamic-batching-buffer-overflow-factor 2",
         "Here --max-requests and --max-step-tokens say it"),
        ("serve smollm2 --bf16", "Here that is --dtype bfloat16 (see"),
        ("bench latency --num-tokens-to-prompt 9", "Here that is --input-len"),
        ("chat -ngl 99", "option -ngl. Here that is --device cuda"),
        ("chat -c 4096", "Here that is --max-sequence-length"),
        ("generate smollm2 -p x --stop END", "Here that is --stop-word"),
        ("generate smollm2 -p x --qqq", "unrecognized option --qqq (see"),
        # Names that are alike by chance are no spelling of one another.
        ("generate smollm2 -p x --port 80", "unrecognized option --port (see"),
        ("serve smollm2 --slots", "unrecognized option --slots (see"),
        ("serve smollm2 --hf-token x", "HF_TOKEN"),
        ("serve smollm2 --disable-log-requests", "Here that is --no-request-log"),
        ("serve smollm2 --kv-cache-dtype fp8", "such as --dtype bfloat16"),
        ("serve smollm2 --override-generation-config {}", "each request says it, else the model's"),
        ("generate smollm2 -p x --typical-p 1", "it is not served: use --top-p or --min-p"),
        ("generate smollm2 hi", "a prompt is given by -p 'hi'"),
        ("chat smollm2 hi", "unrecognized arguments: hi: leave it out"),
        ("chat --enable-prefix-caching=no", "takes no value: write --enable-"),
    ],
)  # fmt: skip
def test_names_of_others(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert (end.value.code, told in line) == (2, True), line


@pytest.mark.parametrize("command", ["generate", "serve", "chat", "replica"])
def test_what_is_named_exists(command: str) -> None:
    parser = parsers()[command]
    known = parser._option_string_actions
    for option in ELSEWHERE | SHORT.keys():
        told = option_meant(option, known)
        assert told, option
        named = set(OPTION.findall(re.sub("`.*`", "", told)))
        assert named <= {*known, "--json"} or told.endswith("does not have"), option


@pytest.mark.parametrize("command", ["generate", "serve", "coordinator"])
def test_options_of_megatrons_inference_are_answered(command: str) -> None:
    """All that Megatron-LM's parser has for inference, read from its source, and its designs'."""
    source = Path(str(find_spec("megatron.core").origin)).parents[1] / "training/arguments.py"
    (added,) = (
        each for each in ast.parse(source.read_text("utf-8")).body
        if isinstance(each, ast.FunctionDef) and each.name == "_add_inference_args"
    )  # fmt: skip
    theirs = {text for text in re.findall(r"'(--[a-z-]+)'", ast.unparse(added))}
    theirs |= {option.replace("--", "--no-") for option in theirs if "prefix-caching" in option}
    theirs |= {f"--inference-dynamic-batching-{name}" for name in OF_OTHER_VERSIONS}
    theirs |= {*OF_ITS_SCRIPTS}
    assert len(theirs) > 45
    known = parsers()[command]._option_string_actions
    assert [option for option in theirs - known.keys() if not option_meant(option, known)] == []


def test_commands_that_are_named_exist() -> None:
    own = parsers()
    assert set(COMMANDS.values()) <= own.keys()
    assert not COMMANDS.keys() & own.keys()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("lookahead=100 must be at most 64.", "--lookahead 100 must be at most 64."),
        ("max_tokens=5 is smaller than max_requests=9: lower max_requests.",
         "--max-step-tokens 5 is smaller than --max-requests 9: lower --max-requests."),
        ("device='gpu' is unknown: a device is", "--device gpu is unknown: a device is"),
        ("5 was given without log probs: set return_log_probs=True too.",
         "5 was given without log probs: set --log-probs too."),
        ("Give at least buffer_size_gb=1.25, or", "Give at least --buffer-size-gb 1.25, or"),
        ("max_unfinished_of_owner=0 must be more than 0, or None.",
         "--max-unfinished-per-key 0 must be more than 0, or leave it out."),
        ("draft_vocab_size=9 is for speculative_method='mtp', not None: leave it out.",
         "--draft-vocab-size 9 is for --speculative-method mtp: leave it out."),
        ("enable_prefix_caching=True or enable_prefix_caching=False",
         "--enable-prefix-caching or --no-enable-prefix-caching"),
        ("num_tokens_to_generate=0; num_query_groups=3", "--max-new-tokens 0; num_query_groups=3"),
        ("SamplingParams(return_log_probs=True).", "SamplingParams(return_log_probs=True)."),
    ],
)  # fmt: skip
def test_settings_in_errors_are_options(said: str, told: str) -> None:
    assert in_options(said) == told


def test_what_is_no_unknown_option() -> None:
    """Negative numbers, texts with blanks, short options with their values, unique beginnings."""
    words = ["generate", "m", "-n5", "-px", "--temp=0", "--stop-word", "- a", "--seed", "-1"]
    found = build_parser().parse_args(words)
    assert (found.num_tokens_to_generate, found.prompt, found.temperature) == (5, ["x"], 0)
    assert (found.stop_words, found.seed) == (["- a"], -1)
