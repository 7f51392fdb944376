"""The command line: parsing, errors in one line, and real runs of a tiny random model."""

import contextlib
import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_async import (
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    SamplingParams,
    Status,
    llm,
)
from megatron_async.cli import main as cli
from megatron_async.cli import output as cli_output
from megatron_async.errors import RequestError
from megatron_async.ops.compile_kernels import cores
from megatron_async.requests.defaults import default_sampling_params, generation_defaults
from tests.unit_tests.cli.cli_runs import TINY, fails


def parse(*arguments):
    return cli.build_parser().parse_args(["generate", "--model", "m", *arguments])


def sampled(arguments):
    """The parameters of a model that says nothing of its sampling."""
    return default_sampling_params(generation_defaults(None), **cli.given_sampling(arguments))


def test_help_needs_no_torch():
    code = (
        "import sys; from megatron_async.cli.main import build_parser; "
        "build_parser().format_help(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'megatron.core')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "command", ["", "generate", "convert", "compile", "info", "profile", "replay", "simulate"]
)
def test_help_of_every_command(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*command.split(), "--help"])
    assert exit_.value.code == 0
    assert "usage: megatron-async" in capsys.readouterr().out


def test_help_tells_a_default_once(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    text = capsys.readouterr().out
    assert "stages that split the layers between them (default: 1)\n" in text


def test_module_runs_as_a_program():
    command = [sys.executable, "-m", "megatron_async", "--version"]
    assert subprocess.check_output(command, text=True).startswith("megatron-async 0.")


@pytest.mark.parametrize("bad", [["--lookahead", "x"], ["--dtype", "int8"], ["--nonsense"]])
def test_a_mistyped_option_is_one_line_and_exit_2(bad, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*TINY, "--prompt", "1", *bad])
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("megatron-async: error: ")


def test_sampling_options_reach_sampling_params():
    arguments = parse(
        *("--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1"),
        *("--seed", "3", "--stop-token-id", "4", "--stop-token-id", "5", "--max-new-tokens", "6"),
    )
    assert sampled(arguments) == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        stop_token_ids=[4, 5],
        num_tokens_to_generate=6,
    )


def test_states_dtype_of_hybrids(capsys, monkeypatch):
    dtypes = []

    def watched(self, *arguments):
        dtypes.append(self.context.config.mamba_ssm_states_dtype)
        return close(self, *arguments)

    close = DynamicInferenceEngine.close
    monkeypatch.setattr(DynamicInferenceEngine, "close", watched)
    hybrid = ["generate", "--model", "dummy:tiny-hybrid", "--device", "cpu", "--no-progress"]
    hybrid += ["--max-requests", "2", "--prompt", "1 2", "--max-new-tokens", "2"]
    assert cli.main([*hybrid, "--mamba-ssm-states-dtype", "bfloat16"]) == 0
    assert cli.main(hybrid) == 0
    assert dtypes == ["bfloat16", "float32"]
    capsys.readouterr()
    line = fails(capsys, *hybrid, "--mamba-ssm-states-dtype", "fp16")
    assert "--mamba-ssm-states-dtype fp16 is unknown: use one of float32, bfloat16" in line


@pytest.mark.parametrize("model", ["dummy:tiny", "dummy:tiny-hybrid"])
def test_speculation(capsys, model):
    """Without a tokenizer prompts are token ids; a dummy model says one token again and again."""
    asked = ["generate", "--model", model, "--device", "cpu", "--no-progress", "--json"]
    asked += ["--prompt", "1 2 3 1 2 3 1 2", "--max-new-tokens", "40", "--ignore-eos"]
    found = []
    for more in ([], ["--speculative-method", "ngram", "--num-speculative-tokens", "2"]):
        assert cli.main([*asked, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted = (run["results"][0]["generated_tokens"] for run in found)
    assert plain == drafted
    stats = found[1]["stats"]
    assert stats["drafted_tokens"] == stats["drafted_tokens_at_1"] + stats["drafted_tokens_at_2"]
    assert stats["fewer_drafts_nothing_found"] + stats["drafted_tokens_at_1"] > 0
    line = fails(capsys, *asked, "--speculative-method", "mtp")
    assert "has no layers of multi-token prediction (mtp_pattern = ''): use --specul" in line
    line = fails(capsys, *asked, "--num-speculative-tokens", "2")
    assert "--num-speculative-tokens 2 needs a drafter: set --speculative-method ngram" in line


def test_defaults_are_greedy_and_256_tokens():
    sampling = sampled(parse())
    assert sampling.is_greedy
    assert (sampling.num_tokens_to_generate, sampling.termination_id) == (256, None)


def test_ignore_eos_and_the_long_name_of_max_new_tokens():
    sampling = sampled(parse("--ignore-eos", "--num-tokens-to-generate", "9"))
    assert (sampling.num_tokens_to_generate, sampling.termination_id) == (9, -1)


def test_prompts_come_in_order_from_options_then_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("zwei\n\n  \ndrei é\n", encoding="utf-8")
    arguments = parse("--prompt", "eins", "--prompts-file", str(file))
    assert cli.read_prompts(arguments) == ["eins", "zwei", "drei é"]


def test_prompts_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert cli.read_prompts(parse("--prompts-file", "-")) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no prompt"),
        (["--prompts-file", "/no/such/file"], "--prompts-file /no/such/file: no such file"),
        (["--prompt", "1", "--system", "be brief", "--raw"], "which --raw leaves out"),
        (["--prompt", "1", "--system", "be brief"], "no chat template"),
        (["--prompt", "1", "--temperature", "nan"], "--temperature nan"),
        (["--prompt", "1", "--temperature", "-1"], "--temperature -1.0"),
        (["--prompt", "1", "--top-p", "1.5"], "--top-p 1.5"),
        (["--prompt", "1", "--top-k", "5", "--temperature", "0"], "give --temperature 1"),
        (["--prompt", "1", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--prompt", "1", "--timeline", "/no/such/folder/t.json"], "no such folder"),
        (["--prompt", "1", "--record", "/no/such/folder/r.rec"], "--record /no/such/folder/r.rec"),
        (["--prompt", "1", "--record", "/"], "that is a folder"),
        (["--prompt", "1", "--json-schema", "no.json"], "--json-schema no.json: there is no such"),
        (["--prompt", "1", "--json-schema", "{bad"], "the schema is no JSON"),
        (["--prompt", "1", "--json-schema", '{"a": "' + 500 * "x"], "the schema is no JSON"),
        (["--prompt", "1", "--grammar", "no.lark"], "--grammar no.lark: there is no such file"),
        (["--prompt", "1", "--lookahead", "-1"], "--lookahead -1"),
        (["--prompt", "1", "--max-sequence-length", "99999"], "--max-sequence-length 99999"),
        (["--prompt", "words"], "not 'words'"),
        (["--prompt", "1", "--chat"], "no chat template"),
    ],
)
def test_errors_name_the_value(arguments, words, capsys):
    assert words in fails(capsys, *TINY, *arguments)


def test_a_prompts_file_that_is_no_text_or_empty(tmp_path, capsys):
    file = tmp_path / "l.txt"
    file.write_bytes(b"tea\ncaf\xe9\n")
    line = fails(capsys, *TINY, "--prompts-file", str(file))
    assert f"--prompts-file {file}, line 2: byte 0xe9 is no UTF-8" in line
    file.write_text("\n  \n")
    line = fails(capsys, *TINY, "--prompts-file", str(file))
    assert f"--prompts-file {file}: every line of it is empty" in line


def test_unknown_model_is_named(capsys):
    assert "nonsense" in fails(capsys, "generate", "--model", "nonsense", "--prompt", "1")
    assert "nonsense" in fails(capsys, "info", "nonsense")
    assert "nonsense" in fails(capsys, "convert", "nonsense", "/tmp/never-written")


def test_debug_shows_the_traceback(capsys):
    assert cli.main([*TINY, "--prompts-file", "/no/such/file", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_output_is_no_error():
    """Break it: leave `sys.stdout` as Python found it, None."""
    command = f"'{sys.executable}' -m megatron_async info dummy:tiny >&-"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "megatron_async", *TINY, "--prompt", "1 2", "--json"]
    command += ["--max-new-tokens", "4", "--num-kv-blocks", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def request(**fields):
    values = {"request_id": 0, "prompt_tokens": np.array([1, 2], np.int32)}
    return DynamicInferenceRequest(**values, sampling_params=SamplingParams(), **fields)


def test_a_failed_request_is_shown_with_its_cause(capsys):
    error = RequestError("the prompt is empty")
    error.__cause__ = KeyError("x")
    failed = request(status=Status.FAILED, error=error)
    cli_output.print_answer(cli_output.as_record("", failed))
    assert "FAILED: the prompt is empty (cause: KeyError: 'x')" in capsys.readouterr().out


def test_statistics_table_hides_pauses_and_evictions_of_zero(capsys):
    stats = {"steps": 3, "overlap_ratio": 1.0, "pauses": 0, "evictions": 2}
    cli_output.print_statistics(stats)
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().err.splitlines()]
    assert rows == [["steps", "3"], ["overlap ratio", "1.00"], ["evictions", "2"]]


def test_real_run_for_people(capsys):
    prompts = ["--prompt", "1 2 3", "--prompt", "4, 5"]
    assert cli.main([*TINY, *prompts, "--max-new-tokens", "5", "--lookahead", "2"]) == 0
    output = capsys.readouterr()
    assert output.out.count(">>> ") == 2
    assert output.out.count("[5 tokens, length") == 2
    table = dict(line.rsplit(maxsplit=1) for line in output.err.splitlines())
    assert table["generated tokens"] == "10"
    assert table["lookahead"] == "2"
    assert table["overlap ratio"] == "1.00"


def test_a_single_answer_is_shown_token_by_token(capfd):
    """The answer is the one beside another prompt, but written in parts."""
    written = []

    class Screen(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

    options = ["--max-new-tokens", "6", "--prompt", "1 2 3"]
    with contextlib.redirect_stdout(Screen()):
        assert cli.main([*TINY, *options]) == 0
    assert cli.main([*TINY, *options, "--prompt", "9"]) == 0
    both = capfd.readouterr().out
    answer = both[both.index(">>> 1 2 3\n") :].split("\n")[1]
    assert "".join(written).split("\n")[:2] == [">>> 1 2 3", answer]
    assert len(answer.split()) == 6
    # The first token comes at once, the others as they are read.
    parts = [text for text in written if text.strip() and set(text) <= set("0123456789 ")]
    assert len(parts) > 1
    assert len(parts[0].split()) == 1


def test_the_end_of_a_single_answer_that_fails(capsys):
    assert cli.main([*TINY, "--prompt", "999999"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == ">>> 999999"
    assert shown[1].startswith("FAILED: ")
    assert "999999" in shown[1]


def test_each_answer_is_shown_when_it_ends(monkeypatch, capsys):
    """The shorter answer of two is on the screen while the other is made."""
    shown = []
    step = DynamicInferenceEngine.step_modern

    def watched(engine):
        report = step(engine)
        shown.append(capsys.readouterr().out)
        return report

    monkeypatch.setattr(DynamicInferenceEngine, "step_modern", watched)
    prompts = ["--prompt", "1 2 3", "--prompt", "4 999999", "--prompt", "5"]
    assert cli.main([*TINY, *prompts, "--max-new-tokens", "30"]) == 1
    (first,) = [number for number, text in enumerate(shown) if "FAILED" in text]
    assert first < len(shown) - 20
    assert ">>> 4 999999\n" in shown[first]
    rest = capsys.readouterr()
    assert ("".join(shown) + rest.out).count(">>> ") == 3
    assert "tokens/s" in rest.err


def test_an_interrupt_loses_no_answer_that_was_there(monkeypatch, capsys):
    steps = []
    step = DynamicInferenceEngine.step_modern

    def interrupted(engine):
        steps.append(1)
        if len(steps) == 9:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(DynamicInferenceEngine, "step_modern", interrupted)
    prompts = ["--prompt", "1 2 3", "--prompt", "999999", "--max-new-tokens", "30"]
    assert cli.main([*TINY, *prompts]) == 130
    assert ">>> 999999\nFAILED" in capsys.readouterr().out


@pytest.mark.pairs
@pytest.mark.parametrize("prompts", [["1 2"], ["1 2", "3"]], ids=["one", "two"])
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("option", ["--record", "--timeline"])
def test_a_full_disk_beside_the_answers_costs_none(option, as_json, prompts, capsys):
    """/dev/full is opened like a file, and takes nothing."""
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    arguments = [*TINY, *given, *as_json, "--max-new-tokens", "5", option, "/dev/full"]
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert "/dev/full: " in output.err
    assert "o space left on device" in output.err
    if as_json:
        results = json.loads(output.out)["results"]
        assert [len(result["generated_tokens"]) for result in results] == [5] * len(prompts)
    else:
        assert output.out.count("[5 tokens, length") == len(prompts)


def test_real_run_as_json_is_one_document_and_settings_arrive(capsys, tmp_path):
    timeline = tmp_path / "run.timeline.json"
    arguments = ["--prompt", "1 2 3", "--json", "--max-new-tokens", "4", "--lookahead", "0"]
    assert cli.main([*TINY, *arguments, "--timeline", str(timeline)]) == 0
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    assert result["prompt"] == "1 2 3"
    assert result["prompt_tokens"] == [1, 2, 3]
    assert len(result["generated_tokens"]) == 4
    assert (result["status"], result["finish_reason"]) == ("COMPLETED", "length")
    assert document["stats"]["lookahead"] == 0
    assert json.loads(timeline.read_text())["traceEvents"]


def test_one_bad_request_fails_alone_with_exit_1(capsys):
    arguments = ["--prompt", "1 2", "--prompt", "999999", "--max-new-tokens", "3", "--json"]
    assert cli.main([*TINY, *arguments]) == 1
    good, bad = json.loads(capsys.readouterr().out)["results"]
    assert good["status"] == "COMPLETED"
    assert bad["status"] == "FAILED"
    assert "999999" in bad["error"]


def test_info_as_text_and_json(capsys):
    assert cli.main(["info", "dummy:tiny", "--device", "cpu"]) == 0
    assert "tiny" in capsys.readouterr().out
    assert cli.main(["info", "dummy:tiny", "--device", "cpu", "--memory-gb", "1", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["architecture"]["num_layers"] == 2
    assert info["free_bytes"] == 2**30
    assert info["fits"] is True


def test_compile_makes_the_kernels_of_a_program_that_are_missing(capsys, tmp_path, monkeypatch):
    def start(program, workers):
        asked.append((program, workers))
        made = {"folder": tmp_path, "total": 2, "failures": failures, "keep": tuple}
        return nullcontext(SimpleNamespace(join=asked.append, **made))

    asked, failures = [], []
    monkeypatch.setattr(llm, "start_kernels", start)
    monkeypatch.setenv("TRITON_CACHE_DIR", "set again behind the test")
    monkeypatch.setattr(llm, "choose_triton_folder", lambda: True)
    command = ["compile", "dummy:tiny", "--gpu", "h100", "--max-requests", "7", "--no-progress"]
    assert cli.main([*command, "--to", str(tmp_path / "kernels")]) == 0
    assert capsys.readouterr().out.startswith("2 kernels for h100 in 0 s; ")
    (program, workers), bar = asked
    assert (program["capability"], program["dtype"], bar) == ([9, 0], "bfloat16", False)
    assert (program["config"]["max_requests"], workers) == (7, cores())
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kernels")
    assert cli.main([*command, "--device", "cuda"]) == 0
    capsys.readouterr()
    assert "--device cpu has no compiled kernels" in fails(capsys, *command, "--device", "cpu")
    failures.append("tile_kernel: no ptxas")
    assert "1 failed; the first of them: tile_kernel: no ptxas" in fails(capsys, *command)
    monkeypatch.setattr(llm, "start_kernels", lambda program, workers: None)
    assert "unset it" in fails(capsys, *command)
    monkeypatch.setattr(llm, "choose_triton_folder", lambda: False)
    assert "could not be kept: name a folder" in fails(capsys, *command)


def test_convert_and_generate_from_the_result(capsys, tmp_path):
    target = tmp_path / "checkpoint"
    assert cli.main(["convert", "dummy:tiny", str(target), "--no-progress"]) == 0
    assert str(target) in capsys.readouterr().out
    answers = []
    for model in ("dummy:tiny", str(target)):
        arguments = ["--model", model, "--prompt", "1 2 3", "--max-new-tokens", "8", "--json"]
        assert cli.main([*TINY, *arguments]) == 0
        answers.append(json.loads(capsys.readouterr().out)["results"][0]["generated_tokens"])
    assert answers[0] == answers[1]
    assert "--overwrite" in fails(capsys, "convert", "dummy:tiny", str(target))
