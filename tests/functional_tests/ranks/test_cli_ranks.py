"""The command line, and the examples, as torchrun starts them on several ranks: an answer or a
complaint comes once."""

import contextlib
import io
import json
import os
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ranks import free_port, run_ranks

TINY = ("generate", "--model", "dummy:tiny", "--device", "cpu", "--no-progress")
PROMPTS = ("--prompt", "1 2 3", "--prompt", "4 5", "--prompt", "999999", "--max-new-tokens", "5")


def command_line(arguments: tuple[str, ...]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of this rank."""
    from megatron_async.cli import main as cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(arguments)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def torchrun():
    """Environment of ranks, with a store that outlives them, as torchrun keeps it."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    yield {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


def test_replicas_answer_in_the_order_of_prompts_and_write_files_of_their_own(tmp_path):
    files = ("--record", str(tmp_path / "run.rec"), "--timeline", str(tmp_path / "t.json"))
    outcomes = run_ranks(2, command_line, (*TINY, *PROMPTS, "--json", *files))
    alone = command_line((*TINY, *PROMPTS, "--json"))
    document = json.loads(outcomes[0][1])
    results = document["results"]
    assert [result["prompt"] for result in results] == ["1 2 3", "4 5", "999999"]
    assert [result["replica"] for result in results] == [0, 1, 0]
    for result, expected in zip(results, json.loads(alone[1])["results"], strict=True):
        assert result["generated_tokens"] == expected["generated_tokens"]
        assert result["error"] == expected["error"]
    assert [stats["generated_tokens"] for stats in document["replica_stats"]] == [5, 5]
    assert [status for status, _, _ in outcomes] == [1, 1]  # for all: a request failed
    assert outcomes[1][1:] == ("", "")
    assert sorted(os.listdir(tmp_path)) == ["run-0.rec", "run-1.rec", "t-0.json", "t-1.json"]


def test_followers_write_nothing_and_people_read_one_answer(tmp_path):
    arguments = (*TINY, "--prompt", "1 2 3", "--max-new-tokens", "5")
    files = ("--record", str(tmp_path / "run.rec"), "--tensor-model-parallel-size", "2")
    (status, out, err), follower = run_ranks(2, command_line, (*arguments, *files))
    assert status == 0
    assert err.count("generated tokens") == 1  # statistics of one engine, beside the answer
    assert out.count(">>> ") == out.count("[5 tokens, length") == 1
    assert "replica" not in out
    assert follower == (0, "", "")
    assert os.listdir(tmp_path) == ["run.rec"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "1", "--lookahead", "x"), "--lookahead"),
        (("--prompt", "1", "--tensor-model-parallel-size", "3"), "use one of 1, 2"),
        (("--prompt", "1", "--pipeline-model-parallel-size", "4"), "4 processes"),
        (("--prompts-file", "-"), "standard input"),
        # One rank alone has nothing to say against it; it loses the other.
        (("--prompt", "1", "--prompt", "words"), "not 'words'"),
    ],
)
def test_ranks_complain_once(torchrun, arguments, words):
    outcomes = run_ranks(2, command_line, (*TINY, *arguments), environment=torchrun)
    assert [status for status, _, _ in outcomes] == [2, 2]
    assert [out for _, out, _ in outcomes] == ["", ""]
    said = [err for _, _, err in outcomes if err]
    assert len(said) == 1
    assert len(said[0].splitlines()) == 1
    assert words in said[0]


def test_without_a_store_every_rank_complains():
    outcomes = run_ranks(2, command_line, (*TINY, "--prompts-file", "/no/such"))
    assert all("/no/such" in err for _, _, err in outcomes)


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run_examples(calls: list[tuple[str, list[str]]]) -> list[str]:
    """What this rank prints in each."""
    printed = []
    for name, arguments in calls:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EXAMPLES / name))["main"](["--device", "cpu", *arguments])
        printed.append(out.getvalue())
    return printed


def serve_users(users_of_rank: dict[int, list[str]]) -> int:
    """Stream on this rank to its own users; how many tokens they got. A chunk has several if its
    reader was late."""
    experts = ["--model", "dummy:tiny-moe", "--expert-model-parallel-size", "2"]
    users = users_of_rank[int(os.environ["RANK"])]
    printed = run_examples([("many_ranks_stream.py", [*experts, *users])])[0]
    return sum(len(line.split(" ", 1)[1].split(",")) for line in printed.splitlines())


def test_a_replica_without_users_stays_while_others_need_its_experts():
    users = {0: ["--users", "1", "--max-new-tokens", "2"], 1: ["--users", "3"]}
    assert run_ranks(2, serve_users, users) == [2, 48]


def test_examples_on_two_ranks():
    sizes = ["--tensor-model-parallel-size", "2", "--max-new-tokens", "4"]
    calls = [("many_ranks.py", sizes), ("many_ranks_stream.py", [*sizes, "--users", "2"])]
    (answers, streams), follower = run_ranks(2, run_examples, calls)
    assert follower == ["", ""]
    assert [line.split(" -> ")[0] for line in answers.splitlines()] == [
        f"replica 0: [{length}, 7, 9]" for length in (24, 10, 9, 4)
    ]
    tokens = {0: 0, 1: 0}
    for line in streams.splitlines():
        label, chunk = line.split(" ", 1)
        tokens[int(label.strip("[]").split(".")[1])] += len(chunk.split(","))
    assert tokens == {0: 4, 1: 4}
