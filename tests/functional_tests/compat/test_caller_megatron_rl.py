"""Calls of Megatron-LM's RL: engine and coordinator, and its requests at the server."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from megatron.core.inference.apis import ServeConfig
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import get_pg_size

from megatron_async.compat.inference.apis import MegatronLLM
from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from tests.functional_tests.compat.test_megatron_coordinator import stop
from tests.functional_tests.compat.test_megatron_llm import MegatronTokenizer
from tests.support.compat_models import gpt_model
from tests.support.compat_trio import make_compat_engine
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.patience import PATIENCE_S
from tests.support.served_demo import (
    answered,
    asked_chat,
    demo,
    demo_card,
    demo_tokenizer,
    streamed,
    tokens_of,
)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return gpt_model().eval()


def test_megatron_rl(model: GPTModel) -> None:
    """`MegatronLocal` of `megatron.rl`, Megatron-LM main d98e8a64, but for its HTTP server: engine,
    ledger, client, `suspend` and `resume`."""
    config = MegatronConfig(
        max_sequence_length=64, buffer_size_gb=0.01, max_requests=4, block_size_tokens=16
    )
    engine = make_compat_engine(model, config, MegatronTokenizer())
    engine.local_metadata_ledger_enabled = True
    assert get_pg_size(engine.pg_collection.dp) * engine.context.max_requests == 4

    async def resume(client: InferenceClient) -> None:
        if engine._state_events[EngineState.RUNNING].is_set():
            return
        client.resume_engines()
        await engine.wait_until(EngineState.RESUMED)
        client.unpause_engines()
        await engine.wait_until(EngineState.RUNNING)

    async def use() -> None:
        address = await engine.start_listening_to_data_parallel_coordinator(
            launch_inference_coordinator=True
        )
        client = InferenceClient(inference_coordinator_address=address)
        client.start(connect_timeout_seconds=PATIENCE_S)
        client.set_generation_epoch(3)
        await resume(client)
        params = SamplingParams(num_tokens_to_generate=4, top_k=1, termination_id=-1)
        answer = await client.add_request([1, 2, 3], params)
        assert isinstance(answer, dict)
        await client.add_request([1, 2, 3], SamplingParams(temperature=-1.0))  # fails
        client.pause_engines()
        await engine.wait_until(EngineState.PAUSED)
        client.suspend_engines()
        await engine.wait_until(EngineState.SUSPENDED)
        assert not engine._state_events[EngineState.RUNNING].is_set()
        ledger, engine.local_metadata_ledger = engine.local_metadata_ledger, {}
        ((uid, finished),) = ledger.items()
        assert uid.startswith("chatcmpl-")
        assert finished.policy_epoch == [(0, 3)]
        assert finished.num_evictions == 0
        await resume(client)
        assert engine._state_events[EngineState.RUNNING].is_set()
        await stop(client, engine)

    try:
        asyncio.run(use())
    finally:
        engine.close()
    with pytest.raises(TimeoutError, match="no coordinator listened"):
        InferenceClient("tcp://127.0.0.1:1").start(connect_timeout_seconds=0.01)


def test_requests_of_megatron_rl_at_the_server_that_stands_for_megatrons() -> None:
    """Bodies of `MegatronLocal` and of NeMo-Gym, Megatron-LM main d98e8a64 and NeMo-RL 7ea279ab."""
    theirs, ours = ServedModel.of(demo_card(), as_megatron=True), demo()
    body = {
        "model": "", "temperature": 1.0, "top_p": 0.0, "n": 1, "logprobs": True,
        "skip_prompt_log_probs": True, "add_BOS": True, "return_tokenized_data": True,
        "return_raw_text": True,
    }  # fmt: skip
    asked = asked_chat(theirs, **body)
    params = asked.choices[0].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.0, 0)
    assert asked_chat(ours, top_p=0.0, temperature=1.0).choices[0].params.top_k == 1
    assert asked_chat(theirs).choices[0].params.temperature == 1.0
    assert asked_chat(ours).choices[0].params.temperature == 0.0, "the demo model says nothing"
    for name in ("", "EMPTY", "nvidia/its-own-name"):
        assert asked_chat(theirs, model=name).style.model == "smollm2"
        with pytest.raises(Refusal, match="does not exist"):
            asked_chat(ours, model=name)
    bos = demo_tokenizer().bos
    prompt = list(asked.prompts[0])
    assert prompt[0] == bos
    assert list(asked_chat(theirs).prompts[0]) == prompt[1:]
    message = answered(asked, "Hi you", theirs)["choices"][0]["message"]
    assert message["prompt_token_ids"] == prompt
    assert message["generation_token_ids"] == tokens_of("Hi you")
    assert message["generation_log_probs"] == [
        -1 - 0.5 * i for i in range(len(tokens_of("Hi you")))
    ]
    assert message["raw_text"].startswith("<|im_start|>")
    assert message["raw_text"].endswith("Hi you")
    assert message["policy_epoch"] is None
    bare = asked_chat(theirs, prevent_retokenization=False)
    message = answered(bare, "Hi", theirs)["choices"][0]["message"]
    assert message["generation_log_probs"] == []
    assert not message.keys() & {"prompt_token_ids", "raw_text"}
    assert not answered(asked_chat(ours), "Hi")["choices"][0]["message"].keys() & {"num_evictions"}
    given = ServedModel.of(demo_card(), chat_template="{{ messages[0].content }}!")
    assert demo_tokenizer().detokenize(list(asked_chat(given).prompts[0])) == "Hi!"


def test_a_stream_ends_with_what_megatrons_tells() -> None:
    """The last choice of a stream of Megatron-LM main, d98e8a64 (`openai_streaming.py`)."""
    theirs = ServedModel.of(demo_card(), as_megatron=True)
    asked = asked_chat(theirs, stream=True, logprobs=True, return_raw_text=True)
    *_, last = [event for event in streamed(asked, "Hi you", theirs) if event["choices"]]
    (choice,) = last["choices"]
    ids = tokens_of("Hi you")
    assert choice["generation_token_ids"] == ids
    assert len(choice["generation_log_probs"]) == choice["generated_length"] == len(ids)
    assert (choice["generated_text"], choice["delta"]) == ("Hi you", {})
    assert choice["prompt_token_ids"] == list(asked.prompts[0])
    assert choice["raw_text"].endswith("Hi you")


def test_routes_of_megatron_rl() -> None:
    """The routes that NeMo-RL 7ea279ab polls and megatron.rl (Megatron-LM main d98e8a64) posts to,
    at a socket which the caller has bound (`MegatronLLM.serve` of main), and the ledger."""
    model = gpt_model(
        {
            "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
            "moe_enable_routing_replay": True,
        }
    ).eval()  # fmt: skip
    RouterReplay.clear_global_router_replay_instances()
    config = MegatronConfig(
        max_sequence_length=64, buffer_size_gb=0.01, max_requests=4, block_size_tokens=16
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        MegatronLLM(
            model=model, tokenizer=make_ascii_tokenizer(), inference_config=config,
            coordinator_host="127.0.0.1",
        ) as llm,
    ):  # fmt: skip
        llm.engine.local_metadata_ledger_enabled = True
        asked = ServeConfig(frontend_replicas=1)
        vars(asked)["sock"] = sock
        llm.serve(asked, blocking=False)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"

        def ask(path: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
            body = None if fields is None else json.dumps(fields).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url + path, body, headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return dict(json.load(reply))

        assert ask("/v1/health")["state"] == "running"
        limits = {"max_tokens": 4, "ignore_eos": True, "logprobs": 0}
        said = ask("/completions", {"model": "EMPTY", "prompt": [1, 2, 3], **limits})
        (choice,) = said["choices"]
        assert choice["prompt_token_ids"] == [1, 2, 3]
        assert len(choice["generation_token_ids"]) == len(choice["generation_log_probs"]) == 4
        assert choice["num_evictions"] == 0
        assert [len(layers) for layers in choice["moe_topk_indices"]] == [2] * (3 + 4 - 1)
        assert choice["prompt_moe_topk_indices"] == choice["moe_topk_indices"][:3]
        assert list(llm.engine.local_metadata_ledger) == [said["id"]]
