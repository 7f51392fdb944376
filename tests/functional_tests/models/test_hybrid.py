"""Recurrent layers in the engine, of Mamba-2 and of Gated DeltaNet: whatever happens to a request,
its tokens are those of a serial run.

The models are those of the fuzzer, in float64, with states of nobody full of NaN.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.devices import Chaos, CpuDevice, Device
from megatron_async.errors import ConfigurationError
from tests.support.attention_model import VOCABULARY
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    random_prompts,
    run_at,
    run_together,
)
from tests.support.hybrid_model import HYBRID_MODELS, DeltaAttentionModel, HybridAttentionModel
from tests.support.planted_bugs import Plant
from tests.support.planted_state_bugs import ROLLBACK_BUGS
from tests.support.poison import poison_states

LENGTHS = (5, 19, 1, 40, 270, 8, 2, 3, 129, 127)
PROMPTS = random_prompts(3, LENGTHS, VOCABULARY)
TOKENS = 34
"""Decoding writes a state twice: after 16 and after 32."""
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few slots": {"max_requests": 3},
    "chunks of one token and more": {"max_tokens": 9, "max_requests": 8},
    "chunks of two to three": {"max_tokens": 5, "max_requests": 3},
    "chunks at the borders": {"max_tokens": 150},
    "pauses": {"num_kv_blocks": 60, "block_size_tokens": 8},
    "evictions": {
        "num_kv_blocks": 60, "block_size_tokens": 8, "paused_buffer_size_gb": 1e-9,
    },
}  # fmt: skip
AHEAD = [(0, "reconcile"), (1, "rollback"), (2, "reconcile"), (3, "rollback")]
"""Lookahead and invalidation; each setting is run with two of them, one of each invalidation."""
LATER = {0: 4, 3: 1, 4: 3, 30: 2}
"""Arrivals: how many at which step."""


@pytest.fixture(scope="module", params=HYBRID_MODELS, ids=lambda kind: kind.pattern)
def model(request: pytest.FixtureRequest) -> HybridAttentionModel:
    made: HybridAttentionModel = request.param()
    return made


def make(model: HybridAttentionModel, device: Device | None = None, **settings: Any) -> Any:
    engine = make_engine(
        model, device=device or CpuDevice(Chaos(5, 0.2, 0.001)), **{"max_requests": 10, **settings}
    )
    poison_states(engine)
    return engine


@pytest.fixture(scope="module")
def serial(model: HybridAttentionModel) -> list[list[int]]:
    """Each request alone: prefilled in one piece, no step ahead."""
    engine = make(model, lookahead=0)
    found = [run_together(engine, [Job(prompt, greedy(TOKENS))])[0] for prompt in PROMPTS]
    engine.close()
    assert min(len(set(tokens)) for tokens in found) > 8, "a dull model hides wrong states"
    return found


def arrivals(params: list[SamplingParams]) -> dict[int, list[Job]]:
    jobs = [Job(prompt, mine) for prompt, mine in zip(PROMPTS, params, strict=True)]
    return {step: [jobs.pop(0) for _ in range(count)] for step, count in LATER.items()}


def test_each_token_is_what_a_prefill_of_all_before_it_says(model, serial):
    """Decode against prefill: two ways through the layer that share little. Of one prompt's answer
    the even tokens, of the next one's the odd ones."""
    engine = make(model, max_requests=64, max_tokens=1024)
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, serial, strict=True)):
        known = [prompt + tokens[:count] for count in range(number % 2, TOKENS, 2)]
        ends = run_together(engine, [Job(sequence, greedy(1)) for sequence in known])
        assert [end[0] for end in ends] == tokens[number % 2 :: 2]
    engine.close()


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "lookahead", "invalidation"),
    [(name, *AHEAD[(n + turn) % 4]) for n, name in enumerate(SETTINGS) for turn in range(2)],
)
def test_tokens_are_the_serial_ones(model, serial, name: str, lookahead, invalidation):
    engine = make(model, lookahead=lookahead, invalidation=invalidation, **SETTINGS[name])
    assert run_at(engine, arrivals([greedy(TOKENS)] * len(PROMPTS))) == serial
    stats = engine.stats()
    assert (stats["pauses"] > 0) == (name in ("pauses", "evictions"))
    assert stats["evictions"] > 0 or name != "evictions"
    engine.close()
    assert_all_is_back(engine)


@pytest.mark.pairs
@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"max_tokens": 30, "max_requests": 6}], ids=str)
def test_requests_beside_one_that_ends_unforeseen(
    model: HybridAttentionModel,
    serial: list[list[int]],
    settings: dict[str, Any],
    invalidation: str,
    lookahead: int,
) -> None:
    """Under "rollback" steps are taken back: a state that was written would be read again."""
    params, wanted = stopping(serial)
    engine = make(model, lookahead=lookahead, invalidation=invalidation, **settings)
    assert run_at(engine, arrivals(params)) == wanted
    assert (engine.stats()["discarded_steps"] > 0) == (invalidation == "rollback")
    engine.close()
    assert_all_is_back(engine)


@pytest.mark.parametrize("plant", ROLLBACK_BUGS, ids=lambda plant: plant.__name__)
def test_a_bug_of_rollback_is_seen(model, serial, plant: Plant, monkeypatch):
    params, wanted = stopping(serial)
    plant(monkeypatch)
    settings = {"lookahead": 3, "invalidation": "rollback", "max_tokens": 30, "max_requests": 6}
    engine = make(model, **settings)
    assert run_at(engine, arrivals(params)) != wanted
    engine.close()


def stopping(serial: list[list[int]]) -> tuple[list[SamplingParams], list[list[int]]]:
    """Parameters that stop each request at a token of its own, and the tokens up to there."""
    params, wanted = [], []
    for number, tokens in enumerate(serial):
        at = tokens.index(tokens[3 + 3 * number])
        params.append(greedy(TOKENS, stop_token_ids=[tokens[at]]))
        wanted.append(tokens[: at + 1])
    return params, wanted


def test_captured_steps(model: HybridAttentionModel, serial: list[list[int]]) -> None:
    """Padded rows read and write nothing of anybody."""
    engine = make(model, CapturingCpu(), lookahead=2, num_cuda_graphs=3)
    assert run_at(engine, arrivals([greedy(TOKENS)] * len(PROMPTS))) == serial
    assert engine.stats()["captured_steps"] > 20
    engine.close()


STOPS: dict[str, Callable[[DynamicInferenceEngine], None]] = {
    "pause": lambda engine: (engine.pause(), engine.unpause())[1],
    "suspend": lambda engine: (engine.suspend(), engine.resume())[1],
    "suspend and free": lambda engine: (engine.suspend(free_kv_cache=True), engine.resume())[1],
}


@pytest.mark.parametrize("name", STOPS)
def test_stops(model: HybridAttentionModel, serial: list[list[int]], name: str) -> None:
    engine = make(model, CpuDevice(), lookahead=2, max_tokens=200)
    futures = [
        engine.add_request(number, prompt, greedy(TOKENS)) for number, prompt in enumerate(PROMPTS)
    ]
    for _ in range(4):
        for _ in range(5):
            engine.step_modern()
        STOPS[name](engine)
    drain(engine)
    assert [future.result().generated_tokens for future in futures] == serial
    engine.close()


def test_the_state_is_written_every_few_tokens_only(model: HybridAttentionModel) -> None:
    engine = make(model, CpuDevice(), lookahead=0)
    state = engine.context.gpu_view.states.find(RecurrentState)
    engine.add_request(0, PROMPTS[0], greedy(60))
    bases = []
    while engine.has_unfinished_requests():
        engine.step_modern()
        bases.append(int(state.base[0]))
    assert sorted(set(bases)) == [0, 16, 32, 48]
    engine.close()


def test_memory_is_counted(model: HybridAttentionModel) -> None:
    engine = make(model, CpuDevice(), max_requests=4)
    state = engine.context.gpu_view.states.find(RecurrentState)
    pools = {pool.untyped_storage().data_ptr(): pool for pools in state._layers for pool in pools}
    taken = sum(pool.untyped_storage().nbytes() for pool in pools.values())
    assert taken == 5 * state.bytes_per_slot
    assert engine.context.gpu_view.kv_cache.num_layers == 1
    engine.close()


def test_a_state_of_bfloat16_is_half_as_large() -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        plain = HybridAttentionModel()
        plain.config.params_dtype = torch.float32
        engine = make_engine(plain.float(), mamba_ssm_states_dtype=dtype, max_requests=1)
        pools = engine.context.gpu_view.states.find(RecurrentState)._layers[0]
        sizes[dtype] = pools.state.nbytes
    assert sizes["float32"] == 2 * sizes["bfloat16"]


@pytest.mark.parametrize(
    ("kind", "settings", "sizes", "message"),
    [
        (HybridAttentionModel, {"num_speculative_tokens": 8}, {}, "=8 .*Mamba-2.* at most 7"),
        (HybridAttentionModel, {}, {"mamba_state_dim": 24}, "mamba_state_dim=24 .* power of two"),
        (HybridAttentionModel, {}, {"mamba_state_dim": 8}, "mamba_state_dim=8 .* from 16 on"),
        (DeltaAttentionModel, {"num_speculative_tokens": 8}, {}, "=8 .*Gated DeltaNet.* most 7"),
        (DeltaAttentionModel, {}, {"linear_key_head_dim": 24}, "linear_key_head_dim=24 with"),
        (DeltaAttentionModel, {}, {"linear_value_head_dim": 8}, "=8 is not served: .* of 16"),
    ],
)
def test_sizes_that_are_not_served(
    kind: type[HybridAttentionModel], settings: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    """Refused when the engine is made, not by a failing step."""
    other = kind()
    for name, size in sizes.items():
        setattr(other.config, name, size)
    with pytest.raises(ConfigurationError, match=message):
        make_engine(other, max_requests=2, max_tokens=64, **settings)
