"""The engine on a GPU: the CPU's tokens, no hidden waits, one copy each way a step; rollback and
suspend with captured graphs, and memory that really goes back; kernels that end a step's parts for
NVTX."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from megatron_async import LLM, DynamicInferenceEngine, SamplingParams
from megatron_async.devices import CudaDevice, make_device
from megatron_async.errors import UpdateError
from megatron_async.lab.gpu_profile import FIRST_KERNEL, device_activities, profile_device
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.observe.tracer import PARTS
from tests.support.harness import (
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_at,
)

pytestmark = pytest.mark.gpu

SMALL = ModelArchitecture("llama", 4, 256, 8, 4, 32, 512, 1024, max_position_embeddings=1024)
PROMPT_LENGTHS = (1, 5, 33, 64, 17, 100, 2, 48)
TOKENS = 48

EngineFactory = Callable[..., DynamicInferenceEngine]


@pytest.fixture(scope="module")
def gpu_model() -> torch.nn.Module:
    return make_model(SMALL, torch.device("cuda"))


@pytest.fixture
def make_gpu_engine(gpu_model: torch.nn.Module) -> EngineFactory:
    def make(**config) -> DynamicInferenceEngine:
        settings = {"num_kv_blocks": 128, "max_requests": 16, **config}
        return make_engine(gpu_model, device=CudaDevice(), **settings)

    return make


def jobs() -> list[Job]:
    prompts = random_prompts(0, PROMPT_LENGTHS, SMALL.vocab_size)
    return [Job(prompt, greedy(TOKENS)) for prompt in prompts]


def sampled_jobs() -> list[Job]:
    modes = ({"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {})
    return [
        Job(job.prompt, SamplingParams(num_tokens_to_generate=TOKENS, termination_id=-1, **mode))
        for job, mode in zip(jobs(), modes * 2, strict=True)
    ]


@pytest.fixture(scope="module")
def cpu_tokens() -> list[list[int]]:
    engine = make_engine(make_model(SMALL), lookahead=0, num_kv_blocks=128, max_requests=16)
    tokens = run_at(engine, {0: jobs()})
    engine.close()
    return tokens


@pytest.mark.parametrize("skips", [None, 2, (1, 1, 0, 1)])
def test_windows(skips: int | tuple[int, ...] | None, lookahead: int) -> None:
    """Blocks of window layers go back while captured steps read the tables."""
    architecture = replace(SMALL, sliding_window=24, window_attn_skip_freq=skips)
    small = {"block_size_tokens": 16, "num_kv_blocks": 40, "max_tokens": 96, "max_requests": 6}
    found = []
    for device, settings in (
        ("cpu", {"block_size_tokens": 256, "max_requests": 8}),
        ("cuda", {**small, "lookahead": lookahead}),
        ("cuda", {**small, "lookahead": lookahead, "num_cuda_graphs": 0}),
    ):
        model = make_model(architecture, torch.device(device))
        with_device = CudaDevice() if device == "cuda" else None
        engine = make_engine(model, device=with_device, **settings)
        found.append(run_at(engine, {0: jobs()[:4], 9: jobs()[4:]}))
        assert_all_is_back(engine)
    assert found[0] == found[1] == found[2]


def test_tokens_equal_the_cpus(make_gpu_engine, cpu_tokens: list[list[int]], lookahead):
    engine = make_gpu_engine(lookahead=lookahead)
    assert run_at(engine, {0: jobs()}) == cpu_tokens


def test_pauses_and_evictions_change_nothing(make_gpu_engine, cpu_tokens, lookahead):
    engine = make_gpu_engine(
        lookahead=lookahead, block_size_tokens=16, num_kv_blocks=18, max_tokens=29
    )
    everything = jobs()
    tokens = run_at(engine, {0: everything[:4], 7: everything[4:6], 20: everything[6:]})
    assert tokens == cpu_tokens
    assert engine.stats()["pauses"] > 0
    assert engine.stats()["evictions"] > 0


def test_samples_do_not_depend_on_settings(make_gpu_engine: EngineFactory) -> None:
    serial = run_at(make_gpu_engine(lookahead=0), {0: sampled_jobs()})
    pressed = make_gpu_engine(lookahead=2, block_size_tokens=16, num_kv_blocks=18, max_tokens=29)
    assert run_at(pressed, {0: sampled_jobs()}) == serial
    assert pressed.stats()["evictions"] > 0


@pytest.mark.parametrize(
    "graphs",
    [
        {"num_cuda_graphs": 0},
        {"use_cuda_graphs_for_non_decode_steps": False},
        {"num_cuda_graphs": 2, "cuda_graph_mixed_prefill_count": 2},
        {},
    ],
    ids=["eager", "decode", "few", "all"],
)
def test_graphs_and_eager_agree(make_gpu_engine, cpu_tokens, graphs: dict[str, int | bool]):
    engine = make_gpu_engine(lookahead=1, max_tokens=64, **graphs)
    everything = jobs()
    tokens = run_at(engine, {0: everything[:3], 4: everything[3:4], 9: everything[4:]})
    assert tokens == cpu_tokens
    stats = engine.stats()
    if graphs.get("num_cuda_graphs") == 0:
        assert stats["captured_steps"] == 0
    elif not graphs:
        assert stats["captured_steps"] == stats["steps"]
    else:
        assert 0 < stats["captured_steps"] < stats["steps"]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_no_step_waits_in_secret(make_gpu_engine, cpu_tokens: list[list[int]], sampled: bool):
    engine = make_gpu_engine(lookahead=1, block_size_tokens=16, num_kv_blocks=18, max_tokens=29)
    work = sampled_jobs() if sampled else jobs()
    first = run_at(engine, {0: work})  # warm-up: libraries may wait while they load
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run_at(engine, {0: work})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first == second
    assert engine.stats()["failed_steps"] == 0
    if not sampled:
        assert second == cpu_tokens


@pytest.mark.parametrize("asks", [False, True], ids=["tokens", "log probs"])
def test_copies_of_a_step(make_gpu_engine: EngineFactory, lookahead: int, asks: bool) -> None:
    """To the device only new blocks of a row; to the host log probs, and the samples with them."""
    engine = make_gpu_engine(lookahead=lookahead, block_size_tokens=16)
    for number, job in enumerate(jobs()):
        engine.add_request(number, job.prompt, greedy(100, return_log_probs=asks))
    for _ in range(10):  # past the prefills
        engine.step_modern()
    torch.cuda.synchronize()
    steps = 20  # crosses block boundaries
    before = engine.stats()["steps"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            engine.step_modern()
        torch.cuda.synchronize()
    assert engine.stats()["steps"] == before + steps
    copies = Counter(
        kind for event in profile.events() for kind in ("HtoD", "DtoH") if kind in event.name
    )
    assert copies["DtoH"] == (2 * steps if asks else 0)
    assert 0 < copies["HtoD"] < steps
    drain(engine)


def test_a_graph_after_others_are_gone() -> None:
    """While a tensor of their pool is alive torch refuses to capture into that pool. Break it: keep
    `_graph_pool` whatever has become of its graphs."""
    device, kept = CudaDevice(), []

    def work() -> None:
        kept.append(torch.ones(1000, device="cuda"))

    for _ in range(3):
        graph = device.capture(work)
        graph.replay()
        del graph
    torch.cuda.synchronize()
    assert float(kept[-1].sum()) == 1000.0


PROMPTS = random_prompts(3, (5, 33, 1, 64, 17, 90), SMALL.vocab_size)
LONG = 40


def engine_of(gpu_model: torch.nn.Module, **config: object) -> DynamicInferenceEngine:
    sizes = {"num_kv_blocks": 2000, "max_requests": 8, "max_tokens": 256}
    return make_engine(gpu_model, device=make_device("cuda"), **{**sizes, **config})


@pytest.fixture(scope="module")
def whole(gpu_model: torch.nn.Module) -> list[list[int]]:
    jobs = [Job(prompt, greedy(LONG)) for prompt in PROMPTS]
    return run_at(engine_of(gpu_model, lookahead=0), {0: jobs[:4], 5: jobs[4:]})


@pytest.mark.parametrize("graphs", [None, 0], ids=["captured", "eager"])
@pytest.mark.parametrize("lookahead", [1, 2])
def test_rollback(gpu_model, whole, lookahead, graphs: int | None):
    cut = [tokens[: tokens.index(tokens[4 + 5 * n]) + 1] for n, tokens in enumerate(whole)]
    jobs = [
        Job(prompt, greedy(LONG, termination_id=tokens[-1]))
        for prompt, tokens in zip(PROMPTS, cut, strict=True)
    ]
    engine = engine_of(
        gpu_model, lookahead=lookahead, invalidation="rollback", num_cuda_graphs=graphs
    )
    assert run_at(engine, {0: jobs[:4], 5: jobs[4:]}) == cut
    assert_all_is_back(engine)
    stats = engine.stats()
    assert stats["discarded_steps"] > 0
    assert stats["zombie_rows"] == 0
    assert (stats["captured_steps"] > 0) == (graphs is None)


def test_suspend_gives_memory_back(gpu_model: torch.nn.Module, whole: list[list[int]], lookahead):
    engine = engine_of(gpu_model, lookahead=lookahead)
    graphs, cache = engine.controller.graphs, engine.context.gpu_view.kv_cache
    count = graphs.count
    futures = [engine.add_request(i, prompt, greedy(LONG)) for i, prompt in enumerate(PROMPTS)]
    told, seen = [], []
    for _ in range(3):
        for _ in range(6):
            engine.step_modern()
        before = torch.cuda.mem_get_info()[0]
        told.append(engine.suspend(free_kv_cache=True))
        seen.append(torch.cuda.mem_get_info()[0] - before)
        assert graphs.count == 0
        engine.resume()
        assert graphs.count == count > 0
    # As the driver counts: what other processes on the GPU take at that moment is missing.
    assert max(told) >= 0.9 * cache.num_bytes
    assert max(seen) >= 0.9 * cache.num_bytes
    captured = engine.stats()["captured_steps"]
    drain(engine)
    assert engine.stats()["captured_steps"] > captured
    assert [future.result().generated_tokens for future in futures] == whole


@pytest.mark.parametrize("copies", [(), ("kv_cache",)])
def test_captured_steps_outlive_a_sleep(
    gpu_model: torch.nn.Module, whole: list[list[int]], lookahead: int, copies: tuple[str, ...]
) -> None:
    engine = engine_of(gpu_model, lookahead=lookahead, enable_sleep_mode=True)
    graphs, cache = dict(engine.controller.graphs._graphs), engine.context.gpu_view.kv_cache
    address = cache.layer(0)[0].data_ptr()
    futures = [engine.add_request(i, prompt, greedy(LONG)) for i, prompt in enumerate(PROMPTS)]
    told, seen = [], []
    for _ in range(3):
        for _ in range(6):
            engine.step_modern()
        before = torch.cuda.mem_get_info()[0]
        told.append(engine.suspend(free=["kv_cache"], copies=copies))
        seen.append(torch.cuda.mem_get_info()[0] - before)
        engine.resume()
        assert cache.layer(0)[0].data_ptr() == address
    assert min(max(told), max(seen)) >= 0.9 * cache.num_bytes
    assert engine.controller.graphs._graphs == graphs != {}
    drain(engine)
    assert [future.result().generated_tokens for future in futures] == whole
    assert (engine.stats()["recomputed_tokens"] == 0) is bool(copies)


def test_weights_sleep_too() -> None:
    options = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 64, "max_requests": 4}
    with LLM("dummy:tiny", enable_sleep_mode=True, **options) as llm:  # type: ignore[arg-type]
        engine = llm.engine
        model = engine.controller.inference_wrapped_model.model
        weights = [(name, weight.clone()) for name, weight in model.named_parameters()]
        wanted = [request.generated_tokens for request in llm.generate(PROMPTS, greedy(8))]
        for copies in (["weights"], []):
            assert engine.suspend(free=["kv_cache", "weights"], copies=copies) > 0
            engine.resume(["weights"])
            if not copies:
                assert not any(weight.any() for weight in model.parameters())
                engine.update_weights(weights, version=1, names="megatron")
            engine.resume()
            found = llm.generate(PROMPTS, greedy(8))
            assert [request.generated_tokens for request in found] == wanted


@pytest.mark.parametrize("staging", ["direct", "device", "host"])
def test_new_weights_are_those_of_a_fresh_engine(staging, cpu_tokens, monkeypatch) -> None:
    """Behind captured steps; some copies go together, others alone."""
    monkeypatch.setattr("megatron_async.updates.writes.LARGE", 1 << 19)
    new = make_model(SMALL, seed=5)
    fresh = make_engine(new, lookahead=0, num_kv_blocks=128, max_requests=16)
    wanted = run_at(fresh, {0: jobs()})
    fresh.close()
    model = make_model(SMALL, torch.device("cuda"))
    engine = make_engine(model, device=CudaDevice(), num_kv_blocks=128, max_requests=16)
    assert run_at(engine, {0: jobs()}) == cpu_tokens != wanted
    on_host = [(name, weight.detach()) for name, weight in new.named_parameters()]
    if staging == "direct":
        with pytest.raises(UpdateError, match="pageable"):
            engine.update_weights(on_host, 0, staging=staging, names="megatron")
    tensors = [(name, weight.cuda()) for name, weight in on_host]
    engine.update_weights(tensors, 1, staging=staging, names="megatron")
    for _, tensor in tensors:
        tensor.zero_()  # behind the copies, in the caller's order
    assert run_at(engine, {0: jobs()}) == wanted


def test_memory_that_keeps_its_addresses() -> None:
    device = make_device("cuda")
    before = torch.cuda.mem_get_info()[0]
    own = device.own_memory((64 << 20) + 5, is_shared=True)
    address = own.tensor.data_ptr()
    assert own.tensor.shape == ((64 << 20) + 5,)
    assert own.tensor.device == device.torch_device
    assert before - torch.cuda.mem_get_info()[0] >= 64 << 20
    own.tensor.fill_(7)
    os.close(own.share())
    assert own.give_back() >= 64 << 20
    own.take()
    assert own.tensor.data_ptr() == address
    assert not own.tensor.any()
    view = own.tensor[:8].view(torch.float32)
    del own
    assert view.tolist() == [0.0, 0.0]


MARKERS = [f"{part}_ends" for part in PARTS]


def step_often(engine: DynamicInferenceEngine) -> None:
    for _ in range(4):
        engine.step_modern()


def kernels_of_steps(nvtx: bool) -> list[list[str]]:
    """Names of the kernels of each profiled step, which is captured and has a draft."""
    settings = {"num_speculative_tokens": 1, "speculative_method": "ngram", "num_kv_blocks": 32}
    with LLM("dummy:tiny", device="cuda", nvtx=nvtx, max_requests=4, **settings) as llm:
        engine = llm.engine
        engine.add_request(0, [1, 2, 3], greedy(24))
        step_often(engine)
        before = engine.stats()["captured_steps"]
        profiler = profile_device(partial(step_often, engine))
        assert engine.stats()["captured_steps"] == before + 4
        steps: list[list[str]] = []
        for activity in sorted(device_activities(profiler), key=lambda each: each.start_us):
            if FIRST_KERNEL in activity.name:
                steps.append([])
            if steps:
                steps[-1].append(activity.name)
    return steps


def test_kernels_end_the_parts_of_a_captured_step():
    steps = kernels_of_steps(nvtx=True)
    assert len(steps) >= 3
    for kernels in steps[:-1]:
        assert [name for name in kernels if name in MARKERS] == MARKERS
        places = [0, *(kernels.index(name) for name in MARKERS)]
        assert all(end - start > 1 for start, end in pairwise(places)), kernels
    plain = kernels_of_steps(nvtx=False)
    assert not set(MARKERS) & {name for kernels in plain for name in kernels}
