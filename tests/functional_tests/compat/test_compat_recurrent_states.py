"""Megatron's hybrid model with Megatron's own configuration of its states, in Megatron's order."""

from typing import Any

import pytest
import torch
from megatron.core.inference.config import MambaInferenceStateConfig

from tests.support.compat_hybrids import MAMBA, hybrid_model
from tests.support.compat_models import VOCABULARY, engine_of
from tests.support.compat_trio import compat_engine, greedy_params
from tests.support.harness import drain, greedy, random_prompts

TOKENS = 10
PROMPTS = random_prompts(5, (40, 3, 21), VOCABULARY)
PATTERN = "M-M*-"


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return hybrid_model(PATTERN, **MAMBA).eval()


@pytest.fixture(scope="module")
def expected(hybrid: Any) -> list[list[int]]:
    engine = engine_of(hybrid, with_serving_config=True, lookahead=0)
    requests = engine.generate(PROMPTS, greedy(TOKENS))
    drain(engine)
    engine.close()
    return [list(request.generated_tokens) for request in requests]


@pytest.mark.parametrize("mode", ["legacy", "async"])
@pytest.mark.parametrize("is_told", [True, False])
def test_the_layers_come_from_the_configuration_or_from_the_model(
    hybrid: Any, expected: list[list[int]], mode: str, is_told: bool
) -> None:
    states = MambaInferenceStateConfig.from_model(hybrid, torch.float32, torch.float32)
    assert states is not None
    hybrid.config.is_hybrid_model = is_told
    with compat_engine(
        hybrid,
        async_sched_mode=mode,
        max_requests=4,
        buffer_size_gb=2**-7,
        mamba_inference_state_config=states if is_told else None,
    ) as engine:
        context = engine.context
        assert context.is_hybrid_model
        assert context.model_config.hybrid_layer_pattern == PATTERN
        assert context.config.mamba_ssm_states_dtype == "float32"
        records = engine.generate(PROMPTS, greedy_params(TOKENS))
        found = [record[0].generated_tokens for record in records]
    assert found == expected


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_suspended_half_way(hybrid: Any, expected: list[list[int]], mode: str, static: bool):
    states = MambaInferenceStateConfig.from_model(hybrid, torch.float32, torch.float32)
    with compat_engine(
        hybrid, max_requests=4, buffer_size_gb=2**-7, mamba_inference_state_config=states,
        kv_cache_management_mode=mode, static_kv_memory_pointers=static,
    ) as engine:  # fmt: skip
        futures = [engine.add_request(n, p, greedy_params(TOKENS)) for n, p in enumerate(PROMPTS)]
        for _ in range(4):
            engine.step_modern()
        pools = engine.context.gpu_view.pools
        before = [tensor.data_ptr() for tensor in pools._tensors.values()]
        assert (engine.suspend() > 0) is (mode != "persist")
        engine.resume()
        if static:
            assert [tensor.data_ptr() for tensor in pools._tensors.values()] == before
        drain(engine)
        assert (engine.evicted_request_count > 0) is (mode == "recompute")
        assert [future.result()[0].generated_tokens for future in futures] == expected
