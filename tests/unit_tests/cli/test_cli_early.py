"""Wrong names and values are told before torch is imported, names of other tools with what was
meant; Ctrl-C before there is anything to end in order is one line."""

import argparse
import ast
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_async import __main__
from megatron_async.cli import main as cli
from megatron_async.cli.main import build_parser, main
from megatron_async.cli.option_names import COMMANDS, ELSEWHERE, SHORT, in_options, option_meant
from megatron_async.cli.output import describe
from tests.unit_tests.cli.cli_runs import TINY, fails

LATE = """
import contextlib, io, sys
from megatron_async.cli.main import main
for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        with contextlib.redirect_stdout(io.StringIO()) as announced:
            try:
                status = main(line.split())
            except SystemExit as end:
                status = end.code
    text = told.getvalue()
    assert status == 2, (line, status, text)
    # One sentence, nothing announced, and nothing heavy read for it.
    assert text.count("\\n") == 1 and len(text) < 500, (line, text)
    assert text.startswith("megatron-async: error: "), (line, text)
    assert not announced.getvalue(), (line, announced.getvalue())
    heavy = {"torch", "numba", "transformers", "megatron.core"} & sys.modules.keys()
    assert not heavy, (line, heavy)
"""


def test_without_torch(tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "config.json").write_text("{]")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "layer").write_bytes(bytes(20))
    lines = [
        f"serve smollm2 --port {taken.getsockname()[1]}",
        f"serve {tmp_path}",
        f"serve {tmp_path}/other",
        f"chat {tmp_path}/config.json",
        f"chat smollm2 --draft-layer {tmp_path}/layer",
        "serve",
        "serve smolm2",
        "serve dummy:no",
        "serve /usr",
        "serve /etc/passwd",
        "serve smollm2 --port 99999",
        "serve smollm2 --host no.such.host.invalid",
        "serve smollm2 --api-key-file /no/such",
        "serve smollm2 --ssl-certfile /no/such",
        "serve smollm2 --replicas 0",
        "serve smollm2 --device gpu",
        "serve smollm2 --lookahead 100",
        "serve smollm2 --tensor-model-parallel-size 0",
        "serve smollm2 --policy nope",
        "serve smollm2 --tool-parser nope",
        "serve smollm2 --quantization int3",
        "serve smollm2 --max-body-mb nan",
        "serve smollm2 --shutdown-timeout -1",
        "serve smollm2 --profile-dir /no/such",
        "serve smollm2 --max-unfinished 0",
        "serve smollm2 --coordinator tcp://127.0.0.1:9",
        "serve --coordinator nope",
        "serve --coordinator tcp://127.0.0.1:99999",
        "serve --coordinator tcp://127.0.0.1:9 --secret-file /no/such",
        "replica smolm2",
        "replica smollm2 --coordinator nope",
        "replica smollm2 --device gpu",
        "replica smollm2 --secret-file /no/such",
        "replica smollm2 --metrics-port 99999",
        "coordinator --bind nope",
        "coordinator --policy nope",
        "coordinator --secret-file /no/such",
        "replicas drain",
        "replicas --coordinator nope",
        "bench latency smollm2 --batch-size 0",
        "bench throughput smollm2 --length-sigma -1",
        "bench serve nope",
        "bench serve http://127.0.0.1:1",
        "info smollm2 --memory-gb -1",
        "info /usr",
        "info /etc/passwd",
        "profile smollm2 --batch 0 --out /tmp/never",
        "profile smollm2 --rate 0 --out /tmp/never",
        "profile smollm2 --out /proc/none",
        "chat /usr",
        "chat smollm2 --seed -1",
        "chat smollm2 --draft-layer /no/such",
        "generate smollm2 -p hi --metrics-port 99999",
        "generate smollm2 -p hi --tensor-model-parallel-size 0",
        "generate smollm2 -p hi --buffer-size-gb 0",
        "generate dummy:tiny -p words",
        "generate dummy:tiny -p 1 --chat",
        "convert smollm2 /proc/none/x",
        "convert /usr /tmp/never",
        "compile",
        "compile smolm2",
        "compile dummy:tiny --gpu b200",
        "compile dummy:tiny --to /proc/none/x",
        "simulate --machine /etc/passwd",
        "simulate-fleet --machine nope",
        "simulate-fleet --trace nope",
        "simulate-fleet --replicas 0",
        "replay /etc/passwd",
        "generate smolm2 -p hi",
        "generate dummy:no -p hi",
        "generate smollm2 -p hi --device gpu",
        "generate smollm2 -p hi --lookahead 100",
        "generate smollm2 -p hi --max-requests 0",
        "generate smollm2 -p hi --temperature -1",
        "generate smollm2 -p hi --regex ((",
        "generate smollm2 -p hi --json-schema {]",
        "generate smollm2 -p hi --prompts-file /no/such",
        "generate smollm2 -p hi --record /no/such/folder/x",
        "generate smollm2",
        "generate smollm2 -p hi --temprature 1",
        "profile smolm2 --out /tmp/never",
        "bench latency smolm2",
        "chat smolm2",
        "chat --lookahead -1",
        "chat dummy:tiny",
        "info smolm2",
        "convert smolm2 /tmp/never",
        "convert smollm2 /usr",
        "replay /no/such.rec",
        "replay /usr",
        "simulate --rate 0",
        "simulate --rate nan",
        "simulate --num-requests 0",
        "simulate --lookahead 100",
        "simulate --max-requests 0",
        "simulate --prompt-mean -3",
        "simulate --target-tpot-ms 0",
        "simulate --machine nope",
        "simulate --draft-us -5 --forced-acceptance 0.5",
        "simulate --draft-us 5",
        "simulate --json /no/such/folder/x",
    ]
    done = subprocess.run([sys.executable, "-c", LATE, *lines], capture_output=True, text=True)
    taken.close()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (OSError(28, "No space left on device"), "cannot write m: no space left on device"),
        (ValueError("many words"), "cannot write m: no space left on device"
         " (cause: ValueError: many words)"),
        (ValueError("first\nTraceback\nOSError: no space left on device\n)"),
         "cannot write m: no space left on device"),
        (ValueError("first\nsecond"), "cannot write m: no space left on device"
         " (cause: ValueError: first)"),
        (KeyError(), "cannot write m: no space left on device (cause: KeyError: )"),
    ],
)  # fmt: skip
def test_a_cause_is_one_line_and_nothing_is_said_twice(cause: Exception, told: str) -> None:
    error = ValueError("cannot write m: no space left on device")
    error.__cause__ = cause
    assert describe(error) == told


def test_too_many_open_files_has_a_remedy() -> None:
    for error in (OSError(24, "Too many open files"), RuntimeError("socket: Too many open files")):
        assert "`ulimit -n" in describe(error)
    assert "ulimit" not in describe(OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "smollm2", "--temprature=1"], "Did you mean --temperature?"),
        (["generate", "smollm2", "--temprature=1"], "(see `megatron-async generate --help`)"),
        (["bench", "latency", "--batchsize", "1"], "`megatron-async bench latency --help`"),
        (["serv"], "Did you mean serve?"),
        (["bench", "latancy"], "Did you mean latency?"),
        (["generate", "smollm2", "extra", "-p", "x"], "unrecognized arguments: extra"),
    ],
)
def test_unknown_words(arguments: list[str], words: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "talk to a model in the terminal" in capsys.readouterr().out


def test_a_model_by_place_or_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["-p", "1 2", "-n", "3", "--device", "cpu", "--no-progress"]
    for model in (["dummy:tiny"], ["--model", "dummy:tiny"], ["-m", "dummy:tiny", "dummy:tiny"]):
        assert cli.main(["generate", *model, *rest]) == 0
        assert "[3 tokens, length" in capsys.readouterr().out
    assert "no model was given" in fails(capsys, "generate", *rest)
    two = fails(capsys, "generate", "dummy:tiny", "--model", "smollm2", *rest)
    assert "two models were given" in two


def test_log_probs_that_nobody_would_see(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--log-probs", "--prompt-log-probs"):
        told = fails(capsys, "generate", "dummy:tiny", "-p", "1", option)
        assert "are shown with --json" in told


def test_a_grammar_that_cannot_be_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    schema = '{"not": {}}'
    told = fails(capsys, "generate", "smollm2", "-p", "x", "--json-schema", schema)
    assert '--json-schema: Unimplemented keys: ["not"] (llguidance cannot hold' in told


def test_a_library_that_does_not_fit_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Under `ulimit -v 1500000` NumPy tells of it behind a page of advice."""

    def run(*_: object) -> int:
        try:
            raise ImportError("libx.so: failed to map segment from shared object")
        except ImportError as error:
            raise ImportError("\n\nIMPORTANT: PLEASE READ THIS\n") from error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli, "run_generate", run)
        told = fails(capsys, "generate", "dummy:tiny", "-p", "1")
        assert "as its libraries need (libx.so: failed to map" in told
        assert "ulimit -v" in told
        patched.setattr(cli, "run_generate", lambda _: __import__("no_such_module"))
        with pytest.raises(ImportError):
            cli.main(["generate", "dummy:tiny", "-p", "1"])


def test_help_needs_no_large_library() -> None:
    """`--help`, and a TAB, which parses too, take 0.1 s; NumPy alone would add 0.2 s."""
    code = (
        "import sys; from megatron_async.cli.main import build_parser; build_parser()\n"
        "print([name for name in ('numpy', 'torch', 'zmq', 'huggingface_hub', 'argcomplete') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
        ("serve smollm2 --cache-type-k q8_0", "Here that is --kv-cache-dtype"),
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


def test_interrupt_is_clean(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_prompts", interrupted)
    assert cli.main([*TINY]) == 130
    assert capsys.readouterr().err.strip() == "megatron-async: interrupted"


HELD = """
import os, signal, sys
from megatron_async import __main__
from megatron_async.cli.terminal import raise_interrupts

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron_async.llm":  # inside an import of a module, whoever imports it
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # an import may swallow it, or fail at any place
                pass

sys.meta_path.insert(0, Finder())
sys.argv = ["megatron-async", "generate", "dummy:tiny", "-p", "1"]
sys.exit(__main__.main())
"""


def test_an_interrupt_inside_an_import_ends_the_process():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "megatron-async: interrupted")


def test_an_interrupt_while_the_command_line_is_imported(capsys, monkeypatch):
    class Importing:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "megatron_async.cli.main", Importing())
    assert __main__.main() == 130
    assert capsys.readouterr().err.strip() == "megatron-async: interrupted"
