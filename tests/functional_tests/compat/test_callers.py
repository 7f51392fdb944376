"""Sequences of calls of programs that use Megatron's inference engine, each as it was read at the
commit that its test names."""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from megatron.core.inference.apis import ServeConfig
from megatron.core.inference.async_stream import AsyncStream
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.config import (
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingCoordinatorPolicy,
)
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import get_pg_size
from transformers import AutoTokenizer

from megatron_async.compat.conversions import coordinator_service
from megatron_async.compat.inference.apis import MegatronAsyncLLM, MegatronLLM
from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.inference.text_generation_server.dynamic_text_gen_server import (
    text_generation_server,
)
from megatron_async.errors import ConfigurationError, RequestError
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from tests.functional_tests.compat.test_megatron_coordinator import stop
from tests.functional_tests.compat.test_megatron_llm import MegatronTokenizer
from tests.support import compat_models
from tests.support.compat_hybrids import MAMBA, hybrid_model
from tests.support.compat_models import gpt_model
from tests.support.compat_trio import make_compat_engine
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.patience import PATIENCE_S, eventually
from tests.support.served_demo import (
    CONTEXT,
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


def test_export_deploy(model: GPTModel) -> None:
    """`MegatronLLM` of NeMo Export-Deploy, 914daa6b: a host and no `use_coordinator`; before each
    request with log probs two writes, of which Megatron's model reads the second in every step."""
    config = MegatronConfig(
        max_sequence_length=64, buffer_size_gb=0.01, max_requests=4, block_size_tokens=16,
        materialize_only_last_token_logits=True,
    )  # fmt: skip
    llm = MegatronLLM(
        model=model, tokenizer=MegatronTokenizer(), inference_config=config,
        coordinator_host="127.0.0.1",
    )  # fmt: skip
    params = SamplingParams(
        num_tokens_to_generate=6, top_k=1, termination_id=-1, return_log_probs=True
    )
    with llm:
        before = llm.generate(["The sea"], params)[0]
        llm.engine.materialize_only_last_token_logits = False
        llm.engine.context.config.materialize_only_last_token_logits = False
        after = llm.generate(["The sea"], params)[0]
    assert before.generated_tokens == after.generated_tokens
    assert len(after.prompt_log_probs) == len("The sea") - 1
    assert after.generated_log_probs == pytest.approx(before.generated_log_probs, abs=1e-5)


def test_a_wrapper_and_the_loop_of_main(model: GPTModel) -> None:
    """`MegatronLLM` of Megatron-LM main, d98e8a64, as NeMo-RL's newer worker calls it."""

    class Wrapper(GPTInferenceWrapper):
        pass

    def made(**arguments: Any) -> MegatronLLM:
        config = MegatronConfig(
            max_sequence_length=64, buffer_size_gb=0.01, max_requests=4, block_size_tokens=16
        )
        return MegatronLLM(
            model=model, tokenizer=MegatronTokenizer(), inference_config=config, **arguments
        )

    async def here() -> int:
        return threading.get_ident()

    with made(use_coordinator=True, inference_wrapper_cls=Wrapper) as llm:
        assert type(llm.controller.inference_wrapped_model) is Wrapper
        assert llm.run_sync(here()) == llm.submit(here()).result() != threading.get_ident()
        assert llm.context.kv_block_allocator.pool_size == llm.context.blocks.total + 1
        with pytest.raises(RequestError, match="precomputed_block_hashes"):
            llm.engine.add_request(7, [1, 2], None, [3])  # type: ignore[arg-type]
        handed = SamplingParams(num_tokens_to_generate=2)
        handed.add_attributes({"do_kv_handoff": True, "streaming": False})
        (refused,) = llm.generate(["a"], handed)
        assert "do_kv_handoff=True" in str(refused.events[-2].payload)
        with pytest.raises(RequestError, match="multi_modal_data is not served"):
            llm.generate("a", multi_modal_data={"image": b""})
    with made(inference_wrapper_cls=None) as llm:
        coroutine = here()
        with pytest.raises(RuntimeError, match="use_coordinator=True"):
            llm.run_sync(coroutine)
        coroutine.close()
        with pytest.raises(ConfigurationError, match="use_coordinator=True"):
            llm.serve(ServeConfig(port=1))
    with pytest.raises(ConfigurationError, match=r"inference_wrapper_cls=builtins\.dict"):
        made(inference_wrapper_cls=dict)


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
            await asyncio.sleep(0.01)
        assert engine.finished_request_count == before
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


class HFTokenizerAdapter:
    """What Megatron-Bridge wraps a tokenizer of transformers' library into."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.tokenizer = tokenizer
        self.eod = self.eos_id = tokenizer.eos_token_id
        self.bos, self.vocab_size = tokenizer.bos_token_id, len(tokenizer)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def detokenize(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def test_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`async_text_generation.py` and `openai_server.py` of Megatron-Bridge, 067f987d: a host of
    0.0.0.0, the server's default, no key, and chats by the tokenizer that the adapter wraps."""
    monkeypatch.setattr(compat_models, "VOCABULARY", 49152)
    small = gpt_model({"num_layers": 1}, {"max_sequence_length": 64}).eval()
    demo_tokenizer().save(tmp_path)
    tokenizer = HFTokenizerAdapter(AutoTokenizer.from_pretrained(tmp_path))
    config = MegatronConfig(
        block_size_tokens=16, buffer_size_gb=0.01, max_requests=4, max_sequence_length=64,
        mamba_inference_state_config=MambaInferenceStateConfig.from_model(small),
        pg_collection=getattr(small, "pg_collection", None),
        materialize_only_last_token_logits=False, enable_chunked_prefill=False,
    )  # fmt: skip
    params = SamplingParams(
        temperature=1.0, top_k=1, top_p=0.0, return_log_probs=True, num_tokens_to_generate=4,
        skip_prompt_log_probs=False, termination_id=-1, top_n_logprobs=2, stop_words=None,
    )  # fmt: skip

    async def use() -> None:
        async with MegatronAsyncLLM(
            model=small, tokenizer=tokenizer, inference_config=config, use_coordinator=True,
            coordinator_host=None, coordinator_port=None,
        ) as llm:  # fmt: skip
            prompts = ["The sea is", "Hi"]
            results = await asyncio.gather(*(llm.generate(each, params) for each in prompts))
            assert not any(each.failed() for each in results)
            assert [len(each.generated_top_n_logprobs) for each in results] == [4, 4]
            assert len(results[0].prompt_log_probs) == 2
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            serving = ServeConfig("0.0.0.0", port, [], False, 1)
            serves = asyncio.ensure_future(llm.serve(serving, blocking=True))
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            said = await asyncio.to_thread(asked_at, f"http://127.0.0.1:{port}", chat)
            assert len(said["choices"][0]["message"]["generation_token_ids"]) <= 4
            assert said["usage"]["prompt_tokens"] > 20
        await serves

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))


def asked_at(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a chat, once there is a server."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return dict(json.load(reply))
        except urllib.error.URLError as error:
            if getattr(error, "code", 503) != 503:
                raise
            time.sleep(0.1)


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
