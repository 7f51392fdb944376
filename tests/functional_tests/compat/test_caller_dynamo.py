"""Calls of Dynamo's backend for Megatron: streams and aborts."""

import asyncio
from typing import Any

import pytest
from megatron.core.inference.async_stream import AsyncStream
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt import GPTModel

from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.errors import RequestError
from tests.functional_tests.compat.test_megatron_coordinator import stop
from tests.functional_tests.compat.test_megatron_llm import MegatronTokenizer
from tests.support.compat_models import gpt_model
from tests.support.compat_trio import make_compat_engine
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return gpt_model().eval()


def test_dynamo(model: GPTModel) -> None:
    """Streams and aborts of Dynamo's Megatron backend, names of Megatron-LM main d98e8a64."""
    config = MegatronConfig(
        max_sequence_length=64, buffer_size_gb=0.01, max_requests=4, block_size_tokens=16,
        enable_prefix_caching=True,
    )  # fmt: skip
    engine = make_compat_engine(model, config, MegatronTokenizer())
    asked: dict[str, Any] = {"num_tokens_to_generate": 12, "top_k": 1, "termination_id": -1}
    of_logs = {"return_log_probs": True, "top_n_logprobs": 2}

    async def streamed(
        client: InferenceClient, interval: int = 1, **further: Any
    ) -> tuple[list[dict[str, Any]], Any]:
        params = SamplingParams(**asked, **further)
        params.add_attributes({"streaming_interval": interval})
        stream = client.add_request_streaming([1, 2, 3], params)
        assert isinstance(stream, AsyncStream)
        items = [item async for item in stream]
        assert [list(item) for item in items] == [["partial"]] * (len(items) - 1) + [["final"]]
        assert {item["partial"]["request_id"] for item in items[:-1]} <= {stream.request_id}
        return [item["partial"] for item in items[:-1]], items[-1]["final"]

    async def use() -> None:
        address = await engine.start_listening_to_data_parallel_coordinator()
        client = InferenceClient(address, deserialize=True)
        client.start(connect_timeout_seconds=PATIENCE_S)
        wanted = await client.add_request([1, 2, 3], SamplingParams(**asked, **of_logs))
        parts, final = await streamed(client, **of_logs)
        told = {
            name: [v for p in parts for v in p[name]] for name in parts[-1] if name[:3] == "new"
        }
        assert told["new_tokens"] == final.generated_tokens == wanted.generated_tokens
        assert told["new_log_probs"] == pytest.approx(wanted.generated_log_probs, abs=1e-5)
        for mine, theirs in zip(told["new_top_n_logprobs"], wanted.generated_top_n_logprobs):
            # This tokenizer cannot be sent: tokens are called by their ids.
            assert list(mine.values()) == pytest.approx(list(theirs.values()), abs=1e-5)
        assert parts[0]["prompt_log_probs"] == pytest.approx(wanted.prompt_log_probs, abs=1e-5)
        assert len(parts[0]["prompt_top_n_logprobs"]) == 2
        assert not any("prompt_log_probs" in part for part in parts[1:])
        assert len(parts) > 1

        parts, final = await streamed(client, 5, skip_prompt_log_probs=True, return_log_probs=True)
        assert all(len(part["new_tokens"]) >= 5 for part in parts)
        assert not any("prompt_log_probs" in part for part in parts)
        assert (await streamed(client))[0][0].keys() == {"request_id", "new_tokens"}

        word = wanted.generated_text[4:6]
        parts, final = await streamed(client, stop_words=[word])
        given = [token for part in parts for token in part["new_tokens"]]
        assert given == final.generated_tokens[: len(given)]
        assert word not in final.generated_text

        before = engine.finished_request_count
        long = SamplingParams(num_tokens_to_generate=60, top_k=1, termination_id=-1)
        # Turns of 50 ms: 60 tokens take three seconds, and their aborts come before.
        step = engine.async_step

        async def take_turn() -> dict[str, Any]:
            await asyncio.sleep(0.05)
            return await step()

        engine.async_step = take_turn  # type: ignore[method-assign]
        future = client.add_request([5, 6], long)
        stream = client.add_request_streaming([7, 8], long)
        async for _ in stream:
            break
        client.abort_request(0)  # has ended
        client.abort_request(client.next_request_id - 2)
        await stream.aclose()

        assert [item async for item in stream if "final" in item] == []
        assert future.cancelled()
        assert not client.streams
        assert not client.completion_futures
        while engine.has_unfinished_requests():
            await asyncio.sleep(0.05)
        assert engine.finished_request_count == before
        engine.async_step = step  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="streaming_interval"):
            await streamed(client, 0)
        with pytest.raises(RequestError, match="multi_modal_data is not served"):
            client.add_request([1], long, multi_modal_data={"image": b""})
        with pytest.raises(AttributeError, match="prefill and decode are not divided"):
            client.release_handoff(1)  # type: ignore[attr-defined]
        _, failed = await streamed(client, temperature=-1.0)
        assert failed.failed()
        assert engine.get_prefix_coordination_metrics() == {"waits": 0}
        stream = client.add_request_streaming([7, 8], long)
        await stop(client, engine)
        assert [item async for item in stream if "final" in item] == []

    try:
        asyncio.run(use())
    finally:
        engine.close()
