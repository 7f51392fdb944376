"""The examples of several ranks run."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
from pathlib import Path

from tests.support.ranks import run_ranks

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
