"""Models that Megatron built on several ranks, served on Megatron's groups, give its tokens; so do
two data-parallel ranks behind Megatron's coordinator."""

from typing import Any

import pytest
import torch

from megatron_async.models.parallel_state import ParallelSizes
from tests.functional_tests.compat.test_compat_models import EXPERTS, GPT2, LEARNED, SHARED, UNTIED
from tests.support.compat_models import gpt_model, logits_of
from tests.support.compat_rank_runs import RankFound, prompts_of, serve_part, serve_together
from tests.support.compat_trio import PROMPTS, compat_engine, drive, greedy_params
from tests.support.harness import TINY, make_model
from tests.support.ranks import run_ranks

TP, EP, PP = (
    ParallelSizes(tensor_model_parallel=2),
    ParallelSizes(expert_model_parallel=2),
    ParallelSizes(pipeline_model_parallel=2),
)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], ParallelSizes, str]] = {
    "tensor": ({"qk_layernorm": True, "add_qkv_bias": True}, {}, TP, "HybridModel"),
    "tensor, Megatron's modules": (GPT2, LEARNED, TP, "GPTModel"),
    "tensor, experts": (EXPERTS | SHARED, UNTIED, TP, "HybridModel"),
    "expert": (EXPERTS | SHARED, UNTIED, EP, "HybridModel"),
}


def assert_lively(found: list[RankFound]) -> None:
    assert len({t for one in found for tokens in one.tokens[0] for t in tokens}) >= 5


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_megatrons_tokens(name: str) -> None:
    changes, options, sizes, kind = CASES[name]
    found: list[RankFound] = run_ranks(2, serve_part, changes, options, sizes)
    for one in found:
        assert one.kind == kind
        assert one.tokens == [one.megatrons] * 2
    assert_lively(found)
    if sizes.tensor_model_parallel > 1:
        assert found[0].tokens == found[1].tokens


def test_pipeline_stages_give_the_tokens_of_the_whole_model() -> None:
    changes = {"num_layers": 4, "pipeline_dtype": torch.float32}
    found: list[RankFound] = run_ranks(2, serve_part, changes, UNTIED, PP)
    whole = gpt_model({"num_layers": 4}, UNTIED).eval()
    for prompt, *tokens in zip(prompts_of(0), *found[0].tokens, *found[1].tokens, strict=True):
        assert tokens[1:] == tokens[:1] * 3
        logits = logits_of(whole, [*prompt, *tokens[0]])
        assert tokens[0] == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert_lively(found)


def test_two_ranks_share_the_requests_and_change_states_together() -> None:
    with compat_engine(make_model(TINY)) as engine:
        expected = [list(r.generated_tokens) for r in drive(engine, PROMPTS, greedy_params(12))]
    first, second = run_ranks(2, serve_together)
    assert first["answers"] == expected * 2
    assert first["finished"] > 0
    assert second["finished"] > 0
    assert first["finished"] + second["finished"] == 2 * len(PROMPTS)
    assert first["seeds"] == second["seeds"]
