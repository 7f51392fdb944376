"""Drafts on pipeline stages: the tokens of one serial rank that drafts nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.drafting_ranks import ABORTED, RUNS, drafting, plain
from tests.support.ranks import run_ranks

Plain = tuple[list[dict[str, Any]], list[list[int]]]
COUNTED = ("steps", "rows", "pauses", "evictions", "zombie_rows", "accepted_tokens",
           "drafted_tokens", "ngram_drafts")  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Plain:
    return plain()


@pytest.fixture(scope="module")
def two_stages(alone: Plain) -> list[Any]:
    return run_ranks(2, drafting, 2, alone[1])


def test_two_stages_say_what_one_rank_says(alone: Plain, two_stages: list[Any]) -> None:
    for rank in two_stages:
        for (found, _), run in zip(rank, RUNS, strict=True):
            for number, (got, wanted) in enumerate(zip(found, alone[0], strict=True)):
                where, most = (run, number), len(got["tokens"])
                if got["reason"] == "aborted":
                    assert number in ABORTED, where
                else:
                    assert got["reason"] == wanted["reason"], where
                    assert most == len(wanted["tokens"]), where
                assert got["tokens"] == wanted["tokens"][:most], where
                if wanted["log probs"] is not None:
                    expected = wanted["log probs"][:most]
                    assert got["log probs"] == pytest.approx(expected, abs=1e-4), where


def test_ranks_took_the_same_steps(two_stages: list[Any]) -> None:
    for (_, first), (_, second), run in zip(*two_stages, RUNS, strict=True):
        for name in COUNTED:
            assert first[name] == second[name], (run, name)
        if run[1] == "ngram":  # each is what a search on the host finds
            assert first["ngram_drafts"] > 10, run
        assert first["accepted_tokens"] > 10, run
        assert first["zombie_rows"] > 0 or run[0] == 0, run
        assert (first["evictions"] > 0) == ("max_sequence_length" in run[3]), run
