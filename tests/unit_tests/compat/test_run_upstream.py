import os
from pathlib import Path
from typing import Any

import pytest
import run_upstream
from upstream.example_runs import DYNAMIC, EXAMPLES, Example, Expected, command, differences
from upstream.file_runs import Comparison, compare_file, lost_tests, run, table
from upstream.public_tests import FOLDER, ON_A_GPU, OUT, PUBLIC, unlisted

FILE = FOLDER + "test_made_up.py"
TESTS = """
import pytest
from megatron.core.inference.config import InferenceConfig
from tests.unit_tests.helper import config_class

def test_both():
    assert config_class is InferenceConfig

def test_megatrons_only():
    assert InferenceConfig.__module__.startswith("megatron.core")

def test_ours_only():
    assert InferenceConfig.__module__.startswith("megatron_async")

@pytest.mark.parametrize("which", ["a", "b"])
def test_listed(which):
    assert which == "a" or InferenceConfig.__module__.startswith("megatron.core")

@pytest.mark.skip(reason="no")
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A made-up checkout with one file of tests, and a helper beside."""
    folder = tmp_path / "checkout"
    (folder / FOLDER).mkdir(parents=True)
    for package in ("tests", "tests/unit_tests", "tests/unit_tests/inference"):
        (folder / package / "__init__.py").touch()
    (folder / FILE).write_text(TESTS)
    (folder / "tests/unit_tests/helper.py").write_text(
        "from megatron.core.inference.config import InferenceConfig as config_class\n"
    )
    (folder / "tests/unit_tests/conftest.py").write_text("raise RuntimeError('is not loaded')\n")
    return folder


def test_a_file_runs_on_both_engines_and_leaves_the_checkout_alone(checkout, capsys, monkeypatch):
    before = sorted(checkout.rglob("*"))
    listed = {"test_listed*": "made up"}
    found = compare_file(checkout, FILE, listed, cpu=False, timeout_s=140)
    assert sorted(checkout.rglob("*")) == before
    assert found.control == {
        f"{FILE}::test_both": "",
        f"{FILE}::test_megatrons_only": "",
        f"{FILE}::test_ours_only": found.control[f"{FILE}::test_ours_only"],
        f"{FILE}::test_listed[a]": "",
        f"{FILE}::test_listed[b]": "",
        f"{FILE}::test_skipped": None,
    }
    assert "AssertionError" in str(found.control[f"{FILE}::test_ours_only"])
    assert found.ours[f"{FILE}::test_ours_only"] == ""
    assert list(found.lost) == [f"{FILE}::test_megatrons_only"]
    assert found.row == f"| {FILE} | 4/5 | 1/2 | 2 |"
    # The exit status, and what is printed, by the same outcomes.
    monkeypatch.setattr(run_upstream, "PUBLIC", {"test_made_up.py": ("this engine's", listed)})
    monkeypatch.setattr("upstream.file_runs.compare_file", lambda *_: found)
    monkeypatch.setattr("sys.argv", ["run_upstream.py", str(checkout), "--cpu", "--only", "tests"])
    assert run_upstream.main() == 1
    said = capsys.readouterr().out
    assert "1 lost\n" in said
    assert f"{FILE}::test_megatrons_only: " in said
    assert f"on the list: {FILE}::test_listed[a]: made up (passes all the same)" in said
    assert f"on the list: {FILE}::test_listed[b]: made up\n" in said
    assert "not known to this script, so not run: test_made_up.py" in said
    listed["test_megatrons_only"] = "made up, too"
    assert run_upstream.main() == 0


def test_what_did_not_run_is_lost() -> None:
    one = Comparison("f", {"f::a": "", "f::b": "AssertionError", "f::c": None}, {})
    two = Comparison("g", {"g::a": ""}, {"g::a": ""})
    assert lost_tests([one, two]) == ["f::a: not run: the file does not import"]
    rows = table([one, two]).splitlines()[2:]
    assert rows == ["| f | 1/2 | 0/1 | 0 |", "| g | 1/1 | 1/1 | 0 |", "| all | 2/3 | 1/2 | 0 |"]


@pytest.mark.parametrize("words", [["{}"], ["/no/such/folder", "--cpu"]])
def test_without_a_checkout_or_a_gpu_nothing_runs(
    words: list[str], checkout: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = [word.format(checkout) for word in words]
    monkeypatch.setattr("sys.argv", ["run_upstream.py", *arguments])
    assert run_upstream.main() == 2
    assert capsys.readouterr().err


def test_a_line_says_why_a_run_is_wrong_and_that_time_was_up() -> None:
    verdict = run_upstream.verdict
    assert verdict([]) == "equal"
    assert verdict(["'p': tokens [1], not [2]", "more"]) == "wrong ('p': tokens [1], not [2])"
    assert verdict(["exit status 1\nA\nValueError: b"]) == "wrong (exit status 1; ValueError: b)"
    assert verdict(["timeout: 9 s\nA"]) == "timeout (9 s; A)"


def test_every_file_is_named_once_and_has_a_reason() -> None:
    named = [*PUBLIC, *ON_A_GPU, *OUT]
    assert len(named) == len(set(named))
    assert unlisted([*named, "test_new.py"]) == ["test_new.py"]
    reasons = [*OUT.values(), *(r for _, listed in PUBLIC.values() for r in listed.values())]
    assert all(reasons)


def answer(tokens: list[int], **fields: Any) -> dict[str, Any]:
    return {"input_prompt": "p", "generated_tokens": tokens, **fields}


def test_a_wrong_answer_of_an_example_is_told() -> None:
    plain = Example(DYNAMIC)
    wanted = [Expected([1, 2], "a b", [-1.0, -2.0], 3)]
    assert differences(plain, [answer([1, 2])], wanted) == []
    assert differences(plain, [answer([1, 3])], wanted) == ["'p': tokens [1, 3], not [1, 2]"]
    assert differences(plain, [], wanted) == ["0 answers for 1 prompts"]
    by_flags = {example.flags: example for example in EXAMPLES if example.script == DYNAMIC}
    with_all = by_flags["--return-log-probs",]
    good = {"generated_logprobs": [-1.0, -2.0], "prompt_logprobs": [-3.0, -4.0]}
    assert differences(with_all, [answer([1, 2], **good)], wanted) == []
    for wrong in (
        {"generated_logprobs": [-1.0, -2.1]},
        {"generated_logprobs": [-1.0]},
        {"prompt_logprobs": []},
    ):
        assert differences(with_all, [answer([1, 2], **{**good, **wrong})], wanted)
    without = by_flags["--return-log-probs", "--skip-prompt-log-probs"]
    assert differences(without, [answer([1, 2], **good)], wanted)
    assert not differences(without, [answer([1, 2], **{**good, "prompt_logprobs": None})], wanted)
    top = by_flags["--return-log-probs", "--skip-prompt-log-probs", "--top-n-logprobs", "3"]
    three = {"a": -1.0, "b": -2.0, "c": -3.0}
    best = [three, three]
    assert not differences(top, [answer([1, 2], **good, top_n_logprobs=best)], wanted)
    for bad in ({"a": -1.0}, {"a": -2.0, "b": -1.0, "c": -3.0}):
        assert differences(top, [answer([1, 2], **good, top_n_logprobs=[three, bad])], wanted)
    events = by_flags["--output-request-events",]
    assert differences(events, [answer([1, 2], events=[])], wanted)


def test_an_examples_command_line(tmp_path: Path) -> None:
    words = command(tmp_path, EXAMPLES[1], tmp_path, ["--num-layers", "2"], True, tmp_path / "out")
    assert words.index("--cpu") < words.index(str(tmp_path / DYNAMIC)) < words.index("--num-layers")
    assert words[-1] == "--return-log-probs"
    assert "--no-hook" not in words
    on_gpu = command(tmp_path, EXAMPLES[0], tmp_path, [], False, tmp_path / "out", hook=False)
    assert "--cpu" not in on_gpu
    assert "--no-hook" in on_gpu


def test_a_process_ends_when_its_time_is_up(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo begun; exec sleep 60"]
    status, said = run(words, dict(os.environ), tmp_path, 0.5)
    assert (status, said) == (124, "begun\n")
    assert run(["sh", "-c", "exit 4"], dict(os.environ), tmp_path, 30) == (4, "")
