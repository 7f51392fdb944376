"""What each rank does of a job whose models are spread over ranks behind Megatron's coordinator."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron_async.checkpoints.registry import open_model
from megatron_async.compat.inference.apis import MegatronLLM
from megatron_async.compat.inference.engines import DynamicInferenceEngine
from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.errors import ConfigurationError, JobFailed
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from tests.support.compat_trio import compat_config, greedy_params, make_compat_engine

PROMPTS = [[5, 9, 2], [11] * 20, [3, 1, 4, 1, 5, 9], [250, 7]]
TOKENS = 16
CYCLE = (
    ("pause", "PAUSED"), ("suspend", "SUSPENDED"), ("resume", "RESUMED"), ("unpause", "RUNNING"),
)  # fmt: skip
STATES = [
    "RUNNING",
    *["PAUSING", "PAUSED", "SUSPENDING", "SUSPENDED", "RESUMING", "PAUSED", "UNPAUSING", "RUNNING"]
    * 2,
    "PAUSING", "PAUSED", "STOPPING", "STOPPED",
]  # fmt: skip
"""Options of every rank in `serve_spread`."""
LONGEST_S = 60
AFTER_LOSS_S = 3.0
"""Seconds for which the replica that is left goes on; longer than the grace period of the test."""


def params() -> Any:
    return greedy_params(TOKENS)


def sampled(seed: int) -> Any:
    chosen = greedy_params(TOKENS, top_k=0, temperature=1.0)
    chosen.add_attributes({"seed": seed})
    return chosen


def spread_model(model: str, sizes: ParallelSizes) -> tuple[torch.nn.Module, Any]:
    """This rank's part, and the tokenizer."""
    source, cpu = open_model(model), torch.device("cpu")
    part = build_model(source.architecture, torch.float32, cpu, "local", sizes)
    source.load_weights(part)
    return part, source.tokenizer


def spread_engine(model: str, sizes: ParallelSizes, **settings: Any) -> DynamicInferenceEngine:
    part, tokenizer = spread_model(model, sizes)
    return make_compat_engine(part, compat_config(**settings), tokenizer)


def is_first() -> bool:
    return os.environ["RANK"] == "0"


def watch_states(engine: DynamicInferenceEngine) -> list[str]:
    """The states of an engine from now on, without repetitions."""
    states = engine.coordinated
    assert states is not None
    seen, tell = [states.state.name], states._tell

    def note() -> None:
        if states.state.name != seen[-1]:
            seen.append(states.state.name)
        tell()

    states._tell = note  # type: ignore[method-assign]
    return seen


async def stop(engine: DynamicInferenceEngine, client: InferenceClient | None) -> None:
    """The end of Megatron's example."""
    if client is not None:
        client.pause_engines()
    await engine.wait_until(EngineState.PAUSED)
    if client is not None:
        client.stop_engines()
    await engine.wait_until(EngineState.STOPPED)
    if client is not None:
        client.shutdown_coordinator()
        client.stop()


def serve_spread(model: str, sizes: ParallelSizes) -> dict[str, Any]:
    """Serve all prompts twice, with pauses between and in the middle of requests; twice over, since
    an engine may come back after a stop."""
    engine = spread_engine(model, sizes, check_ranks_agree=True)
    found = [asyncio.run(asyncio.wait_for(_serve(engine), LONGEST_S)) for _ in range(2)]
    assert not engine.has_unfinished_requests()
    finished = engine.finished_request_count
    engine.close()
    return {"served": found, "finished": finished}


async def _serve(engine: DynamicInferenceEngine) -> dict[str, Any]:
    address = await engine.start_listening_to_data_parallel_coordinator()
    seen = watch_states(engine)
    client, futures = None, []
    if is_first():
        client = InferenceClient(address, deserialize=True)
        client.start()
        futures = [client.add_request(prompt, params()) for prompt in PROMPTS]
        futures += [client.add_request(prompt, sampled(9)) for prompt in PROMPTS]
        await futures[0]
    for number in range(2):
        for call, state in CYCLE:
            if client is not None:
                getattr(client, f"{call}_engines")()
            await engine.wait_until(EngineState[state])
        if client is not None:
            client.set_generation_epoch(number)
    answers = [list(answer.generated_tokens) for answer in await asyncio.gather(*futures)]
    await stop(engine, client)
    assert engine.engine_loop_task is not None
    await engine.engine_loop_task
    return {"answers": answers, "states": seen, "epoch": engine.weight_version}


def serve_and_lose(folder: str, sizes: ParallelSizes) -> dict[str, Any]:
    """Serve until a rank has been killed, and a while longer. The test kills it when the file is
    there."""
    engine = spread_engine("dummy:tiny", sizes)
    return asyncio.run(asyncio.wait_for(_serve_and_lose(engine, Path(folder)), LONGEST_S))


async def _serve_and_lose(engine: DynamicInferenceEngine, folder: Path) -> dict[str, Any]:
    address = await engine.start_listening_to_data_parallel_coordinator()
    client, answers = None, []
    if is_first():
        client = InferenceClient(address, deserialize=True)
        client.start()
        killed_s = None
        while killed_s is None or time.monotonic() < killed_s + AFTER_LOSS_S:
            futures = [client.add_request(prompt, params()) for prompt in PROMPTS]
            if (folder / "killed").exists() and killed_s is None:
                killed_s = time.monotonic()
            answers.append([list(one.generated_tokens) for one in await asyncio.gather(*futures)])
            (folder / "serves").touch()
    try:
        await stop(engine, client)
    except JobFailed as error:
        return {"error": type(error).__name__}
    return {"answers": answers, "error": ""}


def lose_while_paused(folder: str, sizes: ParallelSizes) -> dict[str, Any]:
    """Pause, and wait for a state that can never come, since the other rank is killed."""
    engine = spread_engine("dummy:tiny", sizes)

    async def use() -> dict[str, Any]:
        address = await engine.start_listening_to_data_parallel_coordinator()
        client = InferenceClient(address)
        if is_first():
            client.start()
            client.pause_engines()
        await engine.wait_until(EngineState.PAUSED)
        Path(folder, os.environ["RANK"]).touch()
        try:
            await engine.wait_until(EngineState.RUNNING)
        except JobFailed as error:
            return {"error": type(error).__name__}
        finally:
            client.stop()
        raise AssertionError("RUNNING came")

    return asyncio.run(asyncio.wait_for(use(), LONGEST_S))


def start_with_other_settings(sizes: ParallelSizes) -> str:
    """What the start raises where ranks differ."""
    length = 64 if is_first() else 128
    engine = spread_engine("dummy:tiny", sizes, max_sequence_length=length)
    try:
        asyncio.run(engine.start_listening_to_data_parallel_coordinator())
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return ""


def start_where_refused(port: int, sizes: ParallelSizes) -> dict[str, Any]:
    """What the start raises where the coordinator refuses a replica of the job; and whether each
    rank drives its own engine again."""
    engine = spread_engine("dummy:tiny", sizes)
    start = engine.start_listening_to_data_parallel_coordinator
    try:
        asyncio.run(start(port, launch_inference_coordinator=False))
    except ConfigurationError as error:
        records = engine.generate(PROMPTS, params())  # by all ranks alike, as Megatron's scripts do
        tokens = [list(record.merge().generated_tokens) for record in records]
        return {"error": str(error), "answers": tokens}
    finally:
        engine.close()
    raise AssertionError("it was not refused")


def generate_by_megatron_llm(model: str, sizes: ParallelSizes) -> dict[str, Any]:
    """`MegatronLLM` on every rank, as Megatron's `offline_inference.py` has it."""
    part, tokenizer = spread_model(model, sizes)
    refused = ""
    if sizes.expert_model_parallel > 1:
        try:
            MegatronLLM(model=part, tokenizer=tokenizer, inference_config=compat_config())
        except ValueError as error:
            refused = str(error)
    llm = MegatronLLM(
        model=part, tokenizer=tokenizer, inference_config=compat_config(), use_coordinator=True
    )
    with llm:
        answers = []
        if llm.is_primary_rank:
            answers = [list(r.generated_tokens) for r in llm.generate(PROMPTS, params())]
        llm.pause()
        llm.unpause()
    return {"answers": answers, "refused": refused}
