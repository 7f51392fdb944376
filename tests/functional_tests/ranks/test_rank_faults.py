"""A rank that is killed or stopped ends its job within seconds, with an error that names it."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import pytest
from dying_ranks import LAYOUTS, SETTINGS, end_one
from ranks import run_ranks

from megatron_async.communication.death_watch import EXIT_CODE_RANK_LOST


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_is_killed_in_a_step(tmp_path, layout, rank):
    outcome = end_one(tmp_path, LAYOUTS[layout], False, rank, signal.SIGKILL)
    assert "RankLost" in outcome.error, outcome
    assert f"ank {rank} " in outcome.error.splitlines()[-1]


def test_a_rank_is_stopped_in_a_step(tmp_path):
    outcome = end_one(tmp_path, LAYOUTS["tp"], False, 1, signal.SIGSTOP)
    # Its step never ends, since the other's connections stay open: nothing may wait for it.
    assert "RankLost" in outcome.error, outcome
    assert "ank 1 " in outcome.error.splitlines()[-1]
    assert outcome.exit_code == 0


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
def test_a_rank_is_killed_while_the_job_is_idle(tmp_path, rank):
    """The leader's caller does something else, and the follower waits for the leader."""
    outcome = end_one(tmp_path, LAYOUTS["tp"], True, rank, signal.SIGKILL)
    if rank == 0:
        assert "RankLost" in outcome.error
        assert "ank 0 " in outcome.error.splitlines()[-1]
    else:
        assert outcome.exit_code == EXIT_CODE_RANK_LOST


def _with_other_settings(options: dict[str, dict[str, Any]]) -> str:
    from megatron_async import LLM, llm

    mine = options[os.environ["RANK"]]
    # A collective of ranks that differ may never end: it is said before the first of them.
    with patch.object(llm, "build_model"), pytest.raises(Exception) as raised:
        LLM(**{"model": "dummy:tiny", **SETTINGS, "tensor_model_parallel_size": 2, **mine})
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"lookahead": 2}, "lookahead is 1 on rank 0, 2 on rank 1"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "dtype"),
        ({}, {"num_kv_blocks": 48}, "num_kv_blocks"),
    ],
    ids=["lookahead", "dtype", "blocks"],
)
def test_ranks_with_other_settings(first, second, message):
    found = run_ranks(2, _with_other_settings, {"0": first, "1": second})
    for text in found:
        assert text.startswith("ConfigurationError"), text
        assert message in text


def test_sizes_that_do_not_divide_the_heads():
    found = run_ranks(3, _three_ranks)
    for text in found:
        assert "num_attention_heads" in text or "heads" in text
        assert "tensor_model_parallel_size=3" in text


def _three_ranks() -> str:
    from megatron_async import LLM

    with pytest.raises(Exception) as raised:
        LLM(**{"model": "dummy:tiny", **SETTINGS, "tensor_model_parallel_size": 3})
    return str(raised.value)
