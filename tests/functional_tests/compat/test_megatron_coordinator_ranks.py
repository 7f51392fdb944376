"""Two data-parallel ranks behind Megatron's coordinator: one engine's tokens, states together."""

from __future__ import annotations

from tests.support.compat_trio import PROMPTS, compat_engine, drive, greedy_params
from tests.support.coordinated_ranks import serve_together
from tests.support.harness import TINY, make_model
from tests.support.ranks import run_ranks


def test_two_ranks_share_the_requests_and_change_states_together() -> None:
    with compat_engine(make_model(TINY)) as engine:
        expected = [list(r.generated_tokens) for r in drive(engine, PROMPTS, greedy_params(12))]
    first, second = run_ranks(2, serve_together)
    assert first["answers"] == expected * 2
    assert first["finished"] > 0
    assert second["finished"] > 0
    assert first["finished"] + second["finished"] == 2 * len(PROMPTS)
    assert first["seeds"] == second["seeds"]
