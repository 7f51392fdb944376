"""What each data-parallel rank does with Megatron's coordinator example."""

import asyncio
import os
from typing import Any

import torch
from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron_async.compat.inference.inference_client import InferenceClient
from tests.support.compat_trio import PROMPTS, compat_config, greedy_params, make_compat_engine
from tests.support.harness import TINY, make_model
from tests.support.patience import PATIENCE_S

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
