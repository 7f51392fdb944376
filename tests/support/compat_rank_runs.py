"""What a rank does with its part of a model that Megatron built on several ranks."""

import os
from typing import Any, NamedTuple

from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.ranks.join_group import join_group
from tests.support.compat_models import VOCABULARY, engine_of, gpt_model, logits_of
from tests.support.harness import assert_all_is_back, greedy, random_prompts

TOKENS = 8
LENGTHS = (30, 3, 17)


class RankFound(NamedTuple):
    """Of one rank."""

    tokens: list[list[list[int]]]
    """By lookahead, by prompt."""
    megatrons: list[list[int]]
    """By prompt: the likeliest token after each of its tokens, by Megatron's own forward on all
    ranks; none of a model with pipeline stages."""
    kind: str
    """Class of the served model."""


def prompts_of(rank: int) -> list[list[int]]:
    return random_prompts(9 + rank, LENGTHS, VOCABULARY)


def serve_part(changes: dict[str, Any], options: dict[str, Any], sizes: ParallelSizes) -> RankFound:
    """Build this rank's part, serve all prompts (with experts on ranks this rank's own), and ask
    Megatron's forward about the same tokens."""
    model = gpt_model(changes, options, sizes).eval()
    has_experts = sizes.expert_model_parallel > 1
    prompts = prompts_of(int(os.environ["RANK"]) if has_experts else 0)
    found, kind = [], ""
    for lookahead in (0, 1):
        engine = engine_of(model, with_serving_config=bool(lookahead), lookahead=lookahead)
        kind = type(engine.controller.inference_wrapped_model.model).__name__
        if has_experts:
            engine.loop.join(join_group(check_agreement=False)[0])
        requests = engine.generate(prompts, greedy(TOKENS))
        assert [request.error for request in requests] == [None] * len(prompts)
        while engine.in_flight or engine.has_unfinished_requests():
            engine.step_modern()
        found.append([list(request.generated_tokens) for request in requests])
        engine.close()
        assert_all_is_back(engine)
    megatrons = []
    if sizes.pipeline_model_parallel == 1:
        for prompt, tokens in zip(prompts, found[0], strict=True):
            logits = logits_of(model, [*prompt, *tokens])
            assert logits.size(-1) == VOCABULARY
            megatrons.append(logits.argmax(-1)[len(prompt) - 1 : -1].tolist())
    return RankFound(found, megatrons, kind)
