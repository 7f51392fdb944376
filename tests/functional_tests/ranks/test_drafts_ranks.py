"""Drafts on pipeline stages: the tokens of one serial rank that drafts nothing.

Ranks draft what one rank drafts: with the layers of a model for multi-token prediction split
between them, or its experts, or both models' recurrent layers besides.

Break one of these, and a test fails:

- `StepShape.eager`: `dispatch_entries` of this rank's own tokens, or `dispatch_rows` of its rows
- `BatchDimensions.entries`: keep the step's `dispatch_tokens`
"""

import os
from typing import Any

import pytest

from megatron_async import LLM
from tests.support.draft_watches import DraftRecorder
from tests.support.drafting_ranks import ABORTED, RUNS, drafting, plain
from tests.support.harness import greedy
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


Drafts = dict[tuple[int, ...], list[int]]
PROMPTS = ([1, 2, 3], [4] * 9, list(range(40, 90)), [7], list(range(30)))
HALVES = ([0, 1], [2, 3, 4])
"""Jobs of ranks with own requests. The second rank's are longer, and in chunks: the first one
decodes beside them, and ends first."""
SETTINGS: dict[str, Any] = {
    "num_kv_blocks": 64, "block_size_tokens": 16, "max_sequence_length": 256, "max_requests": 4,
    "max_tokens": 32,
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, str, int]] = {
    "tensor": ("tiny-mtp", "tensor_model_parallel_size", 2),
    # The case of RTP-LLM's pull request 972: Gated DeltaNet, experts, 4 drafts, 2 tensor ranks.
    "tensor, Gated DeltaNet": ("tiny-gated-delta-mtp", "tensor_model_parallel_size", 4),
    "experts": ("tiny-hybrid-mtp", "expert_model_parallel_size", 2),
}
"""Model, what two ranks share, drafts."""


def draft(model: str, numbers: list[int], count: int, lookahead: int, **sizes: int) -> Drafts:
    """What an engine drafts for these prompts."""
    with LLM(f"dummy:{model}", device="cpu", speculative_method="mtp", lookahead=lookahead,
             num_speculative_tokens=count, **SETTINGS, **sizes) as llm:  # fmt: skip
        recorder = DraftRecorder(llm.engine)
        llm.generate([PROMPTS[number] for number in numbers], greedy(30))
        return recorder.drafts


def draft_on_a_rank(layout: str) -> Drafts:
    """What this rank of two drafts, one step ahead."""
    model, size, count = LAYOUTS[layout]
    rank, everything = int(os.environ["RANK"]), [*HALVES[0], *HALVES[1]]
    numbers = HALVES[rank] if size == "expert_model_parallel_size" else everything
    return draft(model, numbers, count, 1, **{size: 2})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_draft_what_one_drafts(layout: str) -> None:
    """Behind the same tokens as in serial steps; so as many are accepted in a step."""
    model, _, count = LAYOUTS[layout]
    alone = draft(model, [*HALVES[0], *HALVES[1]], count, 0)
    assert len(set(map(tuple, alone.values()))) > 5
    compared = 0
    for found in run_ranks(2, draft_on_a_rank, layout):
        both = found.keys() & alone.keys()
        compared += len(both)
        assert {tokens: found[tokens] for tokens in both} == {
            tokens: alone[tokens] for tokens in both
        }
        assert len(both) >= 0.9 * len(found)
    assert compared > 100
