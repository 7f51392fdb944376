"""Calls of NeMo Export-Deploy, and of the loop of Megatron-LM's main that it will call."""

import threading
from typing import Any

import pytest
from megatron.core.inference.apis import ServeConfig
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt import GPTModel

from megatron_async.compat.inference.apis import MegatronLLM
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.errors import ConfigurationError, RequestError
from tests.functional_tests.compat.test_megatron_llm import MegatronTokenizer
from tests.support.compat_models import gpt_model


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
