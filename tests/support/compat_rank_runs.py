"""What a rank does with its part of a model that Megatron built on several ranks, and with
Megatron's coordinator example."""

import asyncio
import os
from typing import Any, NamedTuple

import torch
from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.ranks.join_group import join_group
from tests.support.compat_models import VOCABULARY, engine_of, gpt_model, logits_of
from tests.support.compat_trio import PROMPTS, compat_config, greedy_params, make_compat_engine
from tests.support.harness import TINY, assert_all_is_back, greedy, make_model, random_prompts
from tests.support.patience import PATIENCE_S

TOKENS = 8
LENGTHS = (30, 3, 17)


class RankFound(NamedTuple):
    """What one rank found."""

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


CYCLES = 2


def serve_together() -> dict[str, Any]:
    """Serve all prompts on the ranks together, with pauses; the first rank's answers."""
    torch.distributed.init_process_group("gloo")
    found = asyncio.run(asyncio.wait_for(_serve(), PATIENCE_S))
    torch.distributed.destroy_process_group()
    return found


async def _serve() -> dict[str, Any]:
    engine = make_compat_engine(make_model(TINY), compat_config())
    is_first = os.environ["RANK"] == "0"
    address = await engine.start_listening_to_data_parallel_coordinator()
    client, answers, seeds = InferenceClient(address, deserialize=True), [], set[int]()
    if is_first:
        client.start()
        while (await client._wire.stats())["replicas"].keys() != {"dp-0", "dp-1"}:
            await asyncio.sleep(0.02)
        futures = [client.add_request(prompt, greedy_params(12)) for prompt in PROMPTS * 2]
        answers = [list(answer.generated_tokens) for answer in await asyncio.gather(*futures)]
    for _ in range(CYCLES):
        for call, state in (
            ("pause", "PAUSED"), ("suspend", "SUSPENDED"), ("resume", "RESUMED"),
            ("unpause", "RUNNING"), ("pause", "PAUSED"), ("unpause", "RUNNING"),
        ):  # fmt: skip
            if is_first:
                getattr(client, f"{call}_engines")()
            await engine.wait_until(EngineState[state])
    if is_first:
        client.pause_engines()
    await engine.wait_until(EngineState.PAUSED)
    if is_first:
        client.stop_engines()
    await engine.wait_until(EngineState.STOPPED)
    if is_first:
        client.shutdown_coordinator()
        client.stop()
    seeds.add(engine.context.config.inference_sampling_seed)
    finished = engine.finished_request_count
    engine.close()
    return {"answers": answers, "finished": finished, "seeds": seeds}
