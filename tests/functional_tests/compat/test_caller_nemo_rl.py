"""Calls of NeMo-RL and NeMo-Gym: hybrids, histories and thoughts, a server that nobody stops."""

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.config import (
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingCoordinatorPolicy,
)
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.conversions import coordinator_service
from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.compat.inference.text_generation_server.dynamic_text_gen_server import (
    text_generation_server,
)
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from tests.functional_tests.compat.test_megatron_coordinator import stop
from tests.support.compat_hybrids import MAMBA, hybrid_model
from tests.support.compat_trio import make_compat_engine
from tests.support.patience import eventually
from tests.support.served_demo import (
    CONTEXT,
    answered,
    asked_chat,
    demo,
    demo_card,
    tokens_of,
)


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_nemo_rl_hybrid(mode: KVCacheManagementMode) -> None:
    """`MegatronGenerationMixin` of NeMo-RL, 7ea279ab: its configuration of a hybrid model, greedy
    requests by the client, sleep, and wake."""
    hybrid: Any = hybrid_model("M-M*-", **MAMBA).eval()
    states = MambaInferenceStateConfig.from_model(hybrid)
    assert states is not None
    states.conv_states_dtype = states.ssm_states_dtype = torch.float32
    config = MegatronConfig(
        block_size_tokens=16, buffer_size_gb=2**-7, num_cuda_graphs=0, max_tokens=256,
        max_sequence_length=128, kv_cache_management_mode=mode,
        static_kv_memory_pointers=mode is not KVCacheManagementMode.PERSIST,
        use_cuda_graphs_for_non_decode_steps=True, use_flashinfer_fused_rope=False,
        sampling_backend="flashinfer", use_synchronous_zmq_collectives=True,
        materialize_only_last_token_logits=True, enable_chunked_prefill=True,
        enable_prefix_caching=False, pg_collection=hybrid.pg_collection,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK,
        mamba_inference_state_config=states, mamba_memory_ratio=0.1, logging_step_interval=0,
        num_speculative_tokens=0, logprobs_mode="processed_logprobs", max_requests=None,
    )  # fmt: skip
    engine = make_compat_engine(hybrid, config)
    params = SamplingParams(
        temperature=0.0, top_k=1, top_p=0.0, skip_prompt_log_probs=True, return_log_probs=True,
        num_tokens_to_generate=8, termination_id=-1, stop_words=None,
    )  # fmt: skip

    async def use() -> list[Any]:
        address = await engine.start_listening_to_data_parallel_coordinator(
            inference_coordinator_port=None, launch_inference_coordinator=True
        )
        client = InferenceClient(inference_coordinator_address=address, deserialize=True)
        client.start()
        prompt = [5, 17, 40, 3, 66]
        first = await client.add_request(prompt, params)
        client.pause_engines()
        await engine.wait_until(EngineState.PAUSED)
        client.suspend_engines()
        await engine.wait_until(EngineState.SUSPENDED)
        client.resume_engines()
        await engine.wait_until(EngineState.RESUMED)
        client.unpause_engines()
        await engine.wait_until(EngineState.RUNNING)
        second = await client.add_request(prompt, params)
        await stop(client, engine)
        return [first, second]

    try:
        first, second = asyncio.run(use())
    finally:
        engine.close()
    assert len(first.generated_tokens) == len(first.generated_log_probs) == 8
    assert first.generated_tokens == second.generated_tokens


def test_history_of_nemo_gym() -> None:
    """Bodies of NeMo-Gym's `vllm_model`, 07d6b0d0, at Megatron's server: an earlier answer brings
    its ids, which the next prompt begins with; and what it reads in a refusal."""
    theirs, ours = ServedModel.of(demo_card(), as_megatron=True), demo()
    of_gym = {
        "model": "nvidia/its-own-name", "logprobs": True, "top_logprobs": 0, "temperature": 1.0,
        "return_tokens_as_token_ids": True, "max_tokens": 10**6,
    }  # fmt: skip
    question = {"role": "user", "content": "Hi"}
    first = asked_chat(theirs, messages=[question], **of_gym)
    prompt = list(first.prompts[0])
    assert first.choices[0].params.num_tokens_to_generate == CONTEXT - len(prompt)
    message = answered(first, "Hello you", theirs)["choices"][0]["message"]
    # A model may write other tokens than the tokenizer makes of their text.
    message["generation_token_ids"] = [*tokens_of("Hel", ends=False), *tokens_of("lo you")]
    known = prompt + message["generation_token_ids"][:-1]
    assert message["generation_token_ids"] != tokens_of("Hello you")
    further = {"role": "user", "content": "More"}
    history = [question, message, further]
    plain = [{name: each[name] for name in ("role", "content")} for each in history]
    rendered = list(asked_chat(ours, messages=plain).prompts[0])
    found = list(asked_chat(theirs, messages=history, **of_gym).prompts[0])
    assert found[: len(known)] == known
    # Without add_BOS, Megatron's server takes a BOS token off, here <|im_start|>.
    assert found[len(known) :] == rendered[1:][len(prompt) + len(tokens_of("Hello you")) - 1 :]
    assert list(asked_chat(ours, messages=history).prompts[0]) == rendered
    # Only the last answer counts; without ids, or if they are not wanted, nothing does.
    for left_out in (
        {"messages": [*history, {"role": "assistant", "content": "x"}, further]},
        {"messages": [question, message | {"prompt_token_ids": None}, further]},
        {"messages": history, "prevent_retokenization": False},
    ):
        found = list(asked_chat(theirs, **left_out).prompts[0])
        assert found == list(asked_chat(ours, **left_out).prompts[0])[1:]
    for wrong in ({"prompt_token_ids": ["a"]}, {"generation_token_ids": [10**9, 5]}):
        with pytest.raises(Refusal, match=r"generation_token_ids|prompt_token_ids|messages"):
            asked_chat(theirs, messages=[question, message | wrong, further])
    with pytest.raises(Refusal, match="maximum context length was exceeded"):
        asked_chat(theirs, messages=[{"role": "user", "content": "a " * 2 * CONTEXT}])


def test_thoughts_of_nemo_rls_recipes() -> None:
    """Parsers that NeMo-RL's recipes name (7ea279ab), of a model whose template has no thoughts."""
    text = "so</think>Yes."
    served = ServedModel.of(demo_card(), reasoning_parser="deepseek-r1-reasoning")
    for said in (text, f"<think>{text}"):
        message = answered(asked_chat(served), said, served)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "Yes.")
    message = answered(asked_chat(served), "so", served)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", None)
    served = ServedModel.of(demo_card(), reasoning_parser="nemotron-v3-reasoning")
    of_recipes = {"truncate_history_thinking": False, "force_nonempty_content": True}
    asked = asked_chat(served, chat_template_kwargs=of_recipes)
    message = answered(asked, "so", served)["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "so"


def a_network_address() -> str:
    """An IPv4 address of this host that others reach, if it has one."""
    found = [each for all_ in psutil.net_if_addrs().values() for each in all_]
    ours = [each.address for each in found if each.family is socket.AF_INET]
    return next((each for each in ours if not each.startswith("127.")), "127.0.0.1")


def test_the_server_ends_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of NeMo-RL, 7ea279ab, names neither host nor key, and never stops its server: Ray
    kills it. The thread that started the server may have ended long before."""
    address = a_network_address()
    monkeypatch.setenv("MASTER_ADDR", address)

    def work(told: Any) -> None:
        os.setsid()
        arguments = {
            "coordinator_addr": "tcp://127.0.0.1:1", "tokenizer": None, "rank": 0,
            "server_port": 0, "parsers": ["deepseek-r1-reasoning", "qwen3-coder-tool"],
            "verbose": False, "num_replicas": 1,
        }  # fmt: skip
        start = text_generation_server.start_text_gen_server
        thread = threading.Thread(target=start, kwargs=arguments)
        thread.start()
        thread.join()
        assert text_generation_server._server is not None
        told.send(text_generation_server._server.pid)
        signal.pause()

    here, there = multiprocessing.Pipe()
    caller = multiprocessing.get_context("fork").Process(target=work, args=(there,))
    caller.start()
    server = psutil.Process(here.recv())
    eventually(server.children, "an API process", every_s=0.1)
    heard = {each.laddr.ip for each in server.net_connections() if each.status == "LISTEN"}
    assert heard == {"127.0.0.1", address}
    ends = [server, *server.children()]
    caller.kill()
    caller.join()
    eventually(lambda: not any(each.is_running() for each in ends), "the end", every_s=0.1)


def test_a_coordinator_is_where_all_hosts_of_its_job_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NeMo-RL, 7ea279ab, names no host, on two nodes as on one."""
    job = SimpleNamespace(me=0, records=[], address=lambda: "192.0.2.9")
    job.exchange = lambda what, said: [said]
    monkeypatch.setattr(coordinator_service, "place_in_job", lambda: (0, 2))
    monkeypatch.setattr(coordinator_service, "join_job", lambda: job)
    monkeypatch.setattr(coordinator_service, "_start", lambda host, port: f"tcp://{host}:{port}")
    for is_here, host in ((True, "127.0.0.1"), (False, "192.0.2.9")):
        job.records = [SimpleNamespace(on_host_of=lambda me, here=is_here: here)]
        assert coordinator_service.find_address(9, True, None) == f"tcp://{host}:9"
        assert coordinator_service.find_address(9, True, "me") == "tcp://me:9"
