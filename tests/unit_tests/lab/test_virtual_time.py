"""Virtual streams keep the order of real ones, a step takes what its machine says, and `ModelShape`
makes the plans that the model's own configuration makes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.device_state.device_memory import block_shape
from megatron_async.device_state.recurrent_state import RecurrentState
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import TraceRequest
from megatron_async.lab.device_times import MACHINES, CpuTimes, DeviceTimes, Machine
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.simulator import simulate
from megatron_async.lab.virtual_device import VirtualDevice
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import ModelConfig, transformer_config
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.sizes import MambaSizes
from megatron_async.planning.step_plan import IntArray, StepPlan

SHAPE = ModelShape.of_architecture(DUMMY_SHAPES["llama-3.1-8b"], "bfloat16")
CPU = CpuTimes(
    prepare_us=10, launch_us=20, resolve_us=30, eager_launch_us=500, add_us=0, turnaround_us=5
)
DEVICE = DeviceTimes(tokens_us=((0, 1000),), prefill_us=10, decode_us=100, kv_us=1)
MACHINE = Machine(DEVICE, CPU, "made up")


class Zeros:
    def sample(self, plan, context):
        return np.zeros(plan.num_rows, np.int32), np.ones(plan.num_rows, np.int32)


def trace(*requests):
    """(arrival in microseconds, prompt tokens, output tokens) each."""
    return [TraceRequest(at / 1e6, np.ones(prompt, np.int32), out) for at, prompt, out in requests]


def run(requests, machine=MACHINE, forced=(), **config):
    settings = {"num_kv_blocks": 64, "block_size_tokens": 16, "max_requests": 8, "max_tokens": 64}
    config = InferenceConfig(**{**settings, "lookahead": 0, **config})
    return simulate(trace(*requests), SHAPE, config, machine, forced=forced)


def test_events_are_reached_when_their_stream_gets_there():
    device = VirtualDevice()
    copied, computed = device.event(), device.event()
    device.upload.launch(lambda: device.upload.spend(50))
    device.upload.record(copied)
    device.compute.wait(copied)
    device.compute.launch(lambda: device.compute.spend(100))
    device.compute.record(computed)
    assert (copied.time_us(), computed.time_us()) == (50, 150)
    assert device.clock.now_us == 0, "launching does not wait"
    assert not computed.query()
    computed.wait()
    assert device.clock.now_us == 150
    assert copied.query()
    copied.wait()
    assert device.clock.now_us == 150, "the clock never goes back"
    device.clock.spend(1000)
    device.compute.launch(lambda: device.compute.spend(1))
    assert device.compute.free_us == 1151, "work begins when it is launched, not before"
    assert device.compute.busy_us == 101


def test_serial_times_of_one_request():
    served = run([(0, 8, 3)])
    request = served.served.requests[0]
    prefill = 10 + 20 + (1000 + 10 * 8 + 8) + 5 + 30
    first_decode = 10 + 20 + (1000 + 100 + 9) + 5 + 30
    assert request.queue_s == pytest.approx(30e-6)
    assert request.ttft_s == pytest.approx(prefill / 1e6)
    assert request.latency_s == pytest.approx((prefill + 2 * first_decode + 1) / 1e6)
    assert request.tpot_s == pytest.approx((first_decode + 0.5) / 1e6)
    # Between two steps: turnaround, resolve, prepare, launch.
    busy = 1088 + 1109 + 1110
    assert served.idle_share == pytest.approx(2 * 65 / (busy + 2 * 65))


def test_lookahead_hides_the_host():
    requests = [(0, 8, 40), (100, 8, 40)]
    serial, ahead = run(requests), run(requests, lookahead=1)
    assert serial.served.overlap_ratio == 0
    assert ahead.served.overlap_ratio > 0.95
    assert ahead.idle_share == 0 < serial.idle_share
    assert ahead.served.duration_s < serial.served.duration_s
    # The second arrives while a step runs, and finds one more launched when looking ahead.
    ttft = [r.served.requests[1].ttft_s for r in (serial, ahead)]
    assert ttft[1] > ttft[0]


DRAFTING = {"speculative_method": "ngram", "num_speculative_tokens": 2}


def test_right_drafts_save_steps(lookahead):
    """Break it: `ForcedDrafts.sample` without `room`, and requests of the end have too many."""
    requests = [(0, 8, 61)]
    plain = run(requests, lookahead=lookahead)
    right = run(requests, forced=(1, 1), **DRAFTING, lookahead=lookahead)
    # Three tokens a step behind the first, once drafts have been seen to be right.
    assert right.accepted_tokens == right.drafted_tokens > 30
    steps = plain.served.steps - right.accepted_tokens
    assert abs(right.served.steps - steps) <= 1 + lookahead
    assert right.served.duration_s < 0.6 * plain.served.duration_s


def test_wrong_drafts_are_soon_left_out():
    requests = [(0, 8, 200)] * 2
    plain, wrong = run(requests), run(requests, forced=(0, 0), **DRAFTING)
    assert wrong.accepted_tokens == 0 < wrong.drafted_tokens
    assert wrong.served.steps == plain.served.steps
    assert 1 < wrong.served.duration_s / plain.served.duration_s < 1.05


def test_half_of_the_drafts():
    half = run([(0, 8, 500)] * 4, forced=(0.8, 0.5), **DRAFTING, num_kv_blocks=200,
               max_sequence_length=600)  # fmt: skip
    # Of two drafts 0.8 + 0.4 are accepted in the mean, where steps are wide.
    assert half.accepted_tokens / half.drafted_tokens == pytest.approx(0.6, abs=0.06)


def test_time_of_drafting_and_of_wide_rows():
    assert DEVICE.time_us(0, 3, 9) == 1000 + 300 + 9
    assert replace(DEVICE, draft_us=50).time_us(0, 3, 9) == 1000 + 300 + 9 + 50
    with pytest.raises(ConfigurationError, match=r"chances of 1 drafts for.*=2"):
        run([(0, 8, 3)], forced=(1,), **DRAFTING)


def test_a_gap_without_requests_is_no_idling():
    busy, pause = run([(0, 8, 3)]), run([(0, 8, 3), (1e6, 8, 3)])
    assert pause.idle_share == pytest.approx(busy.idle_share)
    assert pause.served.requests[1].ttft_s == pytest.approx(pause.served.requests[0].ttft_s)


def test_what_a_tight_pool_costs_is_counted():
    requests = [(0, 8, 60)] * 6
    config = {"num_kv_blocks": 14, "block_size_tokens": 8, "paused_buffer_size_gb": 1e-9}
    config["enable_prefix_caching"] = False  # or some of it is found again
    roomy, tight = run(requests), run(requests, **config)
    assert (roomy.recomputed_tokens, roomy.served.evictions) == (0, 0)
    assert tight.served.evictions > 0
    assert tight.recomputed_tokens >= 8 * tight.served.evictions
    assert tight.served.duration_s > roomy.served.duration_s


def test_steps_that_are_not_captured_keep_the_host_busy():
    captured = replace(DEVICE, captures_graphs=True, captured_prefill_tokens=64)
    eager = replace(captured, captured_prefill_tokens=0)
    ttft = []
    for device in (captured, eager):
        machine = Machine(replace(device, tokens_us=((0, 100),), prefill_us=0), CPU, "made up")
        served = run([(0, 8, 3)], machine)
        ttft.append(served.served.requests[0].ttft_s)
        idle = 2 * 65  # while launching is no idling, though the device may wait for the host
        assert served.idle_share == pytest.approx(idle / (idle + 108 + 209 + 210))
    assert ttft[0] == pytest.approx((30 + 100 + 8 + 5 + 30) / 1e6)
    assert ttft[1] == pytest.approx((30 + 500 + 5 + 30) / 1e6), "the last launch ends the step"


def test_captured_steps_are_padded():
    device = replace(DEVICE, kv_us=0, captures_graphs=True)
    engine = ModelLessEngine(
        SHAPE, InferenceConfig(num_kv_blocks=64), Zeros(), Machine(device, CPU, "made up")
    )
    for number in range(5):
        engine.add_request(number, [1])
    engine.step_modern()
    before = engine.virtual_device.compute.busy_us
    engine.step_modern()
    assert engine.virtual_device.compute.busy_us - before == 1000 + 100 * 8
    engine.close()


def test_no_memory_is_taken_for_a_model():
    config = InferenceConfig(num_kv_blocks=100_000, block_size_tokens=256)
    engine = ModelLessEngine(SHAPE, config, Zeros())
    key_cache, _ = engine.context.gpu_view.kv_cache.layer(0)
    assert key_cache.device.type == "meta"
    assert key_cache.numel() * 32 * 2 * 2 > 3e12, "3 TB of cache"
    engine.close()
    with pytest.raises(ConfigurationError, match="num_kv_blocks"):
        ModelLessEngine(SHAPE, InferenceConfig(), Zeros())


def test_time_between_and_beyond_the_points():
    times = DeviceTimes(((1, 100.0), (11, 200.0), (21, 400.0)), kv_us=0.5)
    assert [times.time_us(0, rows, 0) for rows in (0, 1, 6, 11, 16, 31)] == [
        100, 100, 150, 200, 300, 600,
    ]  # fmt: skip
    assert times.time_us(5, 1, 10) == 155
    for bad in ((), ((2, 1.0), (1, 2.0))):
        with pytest.raises(ConfigurationError, match="ascending"):
            DeviceTimes(bad)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_built_in_machines(machine):
    times = [machine.device.time_us(0, rows, 190 * rows) for rows in (1, 16, 64, 256)]
    assert times == sorted(times)
    measured = (326, 430, 597, 926), (3816, 4200, 4663, 9019), (2662, 9287, 16070, 21470)
    expected = {row[0]: row for row in measured}[round(times[0])]
    assert times == pytest.approx(expected), "docs/performance.md"


HYBRID = DUMMY_SHAPES["tiny-hybrid"]
RECURRENT = replace(HYBRID, pattern="M-M-M-", num_moe_experts=0)
MAMBA_LAYER = 8 * 16 * 32 + 17 * (8 * 16 + 2 * 32) + 17 * 2 * 8 + 4 * (8 * 16 + 2 * 2 * 32)
"""8 heads of 16, state 32, two groups; a ring of 17 inputs, and of 4."""
DELTA_LAYER = 4 * 16 * 16 + 17 * (4 * 16 + 2 * 16) + 17 * 4 + 4 * (4 * 16 + 2 * 2 * 16)
"""2 key heads and 4 value heads of 16; a ring of 17 pseudo values and keys, and of 4 inputs."""
DELTA = DUMMY_SHAPES["tiny-gated-delta"]
MIXED = replace(
    DELTA, pattern="MGE*-M", num_layers=6,
    **{name: getattr(HYBRID, name) for name in MambaSizes.FIELDS},
)  # fmt: skip
SETTINGS: dict[str, Any] = {"block_size_tokens": 16, "max_tokens": 150, "max_requests": 4}


class Ones:
    def sample(self, plan: StepPlan, context: Any) -> tuple[IntArray, IntArray]:
        return np.ones(plan.num_rows, np.int32), np.ones(plan.num_rows, np.int32)


class Chunks(EngineListener):
    """Prompt tokens of each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def launched(self, plan: StepPlan | None) -> None:
        if plan is not None and len(plan.prefill_token_ids):
            self.seen.append(len(plan.prefill_token_ids))


def stages(architecture: ModelArchitecture, tensor: int, pipeline: int) -> list[ModelConfig]:
    """Configurations of a model on the stages of a pipeline."""
    sizes = ParallelSizes(tensor_model_parallel=tensor, pipeline_model_parallel=pipeline)
    found = [transformer_config(architecture, torch.float32, sizes) for _ in range(pipeline)]
    for number, config in enumerate(found):
        config.pipeline_stage = number
    return found


@pytest.mark.parametrize(
    ("pattern", "chunks"),
    [("MEM*-E", [128, 128, 44]), ("GE*E", [128, 128, 44]), ("*-", [150, 150])],
)
def test_prompts_are_cut_where_scans_are(pattern: str, chunks: list[int]) -> None:
    shape = ModelShape.of_architecture(
        replace(MIXED, pattern=pattern, num_layers=len(pattern)), "bfloat16"
    )
    engine = ModelLessEngine(shape, InferenceConfig(num_kv_blocks=64, **SETTINGS), Ones())
    engine.listeners.append(listener := Chunks())
    engine.generate([[1] * 300], SamplingParams(num_tokens_to_generate=3))
    assert listener.seen == chunks
    engine.close()


def test_a_model_without_attention_needs_no_pool() -> None:
    shape = ModelShape.of_architecture(RECURRENT, "bfloat16")
    config = InferenceConfig(max_sequence_length=320, **SETTINGS)
    engine = ModelLessEngine(shape, config, Ones())
    assert engine.context.blocks.total == 4 * 20, "of four requests that are as long as can be"
    requests = engine.generate([[1] * 300] * 6, SamplingParams(num_tokens_to_generate=20))
    assert all(len(request.generated_tokens) == 20 for request in requests)
    assert engine.stats()["pauses"] == 0
    engine.close()


@pytest.mark.parametrize(
    ("architecture", "elements"),
    [
        (HYBRID, 2 * MAMBA_LAYER),
        (DELTA, 2 * DELTA_LAYER),
        (MIXED, 2 * MAMBA_LAYER + DELTA_LAYER),
    ],
)
def test_states_are_the_models(architecture: ModelArchitecture, elements: int) -> None:
    shape = ModelShape.of_architecture(architecture, "float32")
    engine = ModelLessEngine(shape, InferenceConfig(num_kv_blocks=64, **SETTINGS), Ones())
    state = engine.context.gpu_view.states.find(RecurrentState)
    assert state is not None
    assert state.bytes_per_slot == 4 * elements
    engine.close()


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny", "nemotron-h-8b", "tiny-gated-delta"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_have_blocks_as_large_as_the_largest(name: str, tensor: int, pipeline: int) -> None:
    """By it is reckoned how many of them paused requests may hold."""
    config = InferenceConfig(**SETTINGS)
    ranks = stages(DUMMY_SHAPES[name], tensor, pipeline)
    largest = max(block_shape(rank, config).num_bytes for rank in ranks)
    for rank in ranks:
        context: Any = SimpleNamespace(model_config=rank)
        shape = ModelShape.of_context(context, 512)
        assert block_shape(shape, config).num_bytes == largest
        assert shape.num_mamba_layers == DUMMY_SHAPES[name].count("M")
        assert shape.num_delta_layers == DUMMY_SHAPES[name].count("G")
        assert ModelShape(**shape.to_dict()) == shape
