"""Memory by tags: given back with and without a copy, and taken again at its addresses; and what
must not be done with it."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import pytest
import torch

from megatron_async import LLM, DynamicInferenceEngine
from megatron_async.device_state import pools
from megatron_async.devices.own_memory import CpuOwnMemory
from megatron_async.engine.pausing import EngineState
from megatron_async.errors import ConfigurationError, EngineStopped, OutOfMemoryError, UpdateError
from tests.support.attention_model import VOCABULARY
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
)
from tests.support.hybrid_model import MixedAttentionModel

PROMPTS = [[token % VOCABULARY for token in each] for each in random_prompts(7, (3, 30, 11))]
PARAMS = [
    greedy(20, temperature=0.9, seed=5, repetition_penalty=1.4, presence_penalty=0.5),
    greedy(24),
    greedy(20, temperature=0.8, seed=3),
]
KV, WEIGHTS = "kv_cache", "weights"


def addresses(engine: DynamicInferenceEngine) -> list[int]:
    """Addresses of all that a cache and states hold, and of the weights."""
    model = engine.controller.inference_wrapped_model.model
    tensors = [*engine.context.gpu_view.pools._tensors.values(), *model.parameters()]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model() if request.param == "attention" else MixedAttentionModel()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    engine = make_engine(model, lookahead=0, max_requests=4)
    return [request.generated_tokens for request in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("copies", [(), (KV,)])
def test_requests_go_on(model: Any, expected, keeps: bool, copies: tuple[str, ...]) -> None:
    """With a copy nothing is prefilled again: not the cache, nor states, nor counts of tokens."""
    engine = make_engine(model, lookahead=1, max_requests=4, enable_sleep_mode=keeps)
    chooser, before = random.Random(4), addresses(engine)
    futures = [engine.add_request(n, p, PARAMS[n]) for n, p in enumerate(PROMPTS)]
    stops = freed = 0
    while engine.has_unfinished_requests():
        for _ in range(chooser.randint(2, 5)):
            engine.step_modern()
        freed += engine.suspend(free=[KV], copies=copies)
        if keeps:
            assert not engine.context.gpu_view.pools._tensors["keys and values"].any()
            assert addresses(engine) == before
        engine.context.check_integrity()
        engine.resume()
        assert not engine.context.gpu_view.pools._copies
        stops += 1
    assert min(stops - 3, freed) > 0
    assert [future.result().generated_tokens for future in futures] == expected
    assert (engine.stats()["recomputed_tokens"] == 0) is bool(copies)
    assert_all_is_back(engine)


def test_captured_steps_stay_where_addresses_do() -> None:
    model = make_model()
    wanted = make_engine(model, lookahead=0).generate(PROMPTS[1:2], PARAMS[1:2])
    for keeps in (False, True):
        engine = make_engine(model, device=CapturingCpu(), enable_sleep_mode=keeps)
        graphs = dict(engine.controller.graphs._graphs)
        future = engine.add_request(0, PROMPTS[1], PARAMS[1])
        for _ in range(5):
            engine.step_modern()
        engine.suspend(free_kv_cache=True, copies=[KV])
        assert (engine.controller.graphs.count > 0) is keeps
        engine.resume()
        after = engine.controller.graphs._graphs
        assert after.keys() == graphs.keys() != set()
        assert all((after[key] is graphs[key]) is keeps for key in graphs)
        drain(engine)
        assert future.result().generated_tokens == wanted[0].generated_tokens


def test_bytes_that_go_back_are_measured() -> None:
    options: dict[str, Any] = {"num_kv_blocks": 900, "max_requests": 4, "device": "cpu"}
    process, prompt = psutil.Process(), [list(range(3, 40))]
    with LLM("dummy:tiny", enable_sleep_mode=True, **options) as llm:
        engine = llm.engine
        tokens = engine.generate(prompt, greedy(8))[0].generated_tokens
        cache = engine.context.gpu_view.kv_cache._data
        assert cache is not None
        cache.fill_(1.0)
        before = process.memory_info().rss
        told = engine.suspend(free=[KV, WEIGHTS], copies=[WEIGHTS])
        asleep = process.memory_info().rss
        engine.resume()
        assert engine.generate(prompt, greedy(8))[0].generated_tokens == tokens
        assert told > 0.95 * cache.nbytes > 50 << 20
    assert before - asleep == pytest.approx(told, rel=0.1)


@pytest.fixture
def sleeper() -> Iterator[DynamicInferenceEngine]:
    with LLM("dummy:tiny", device="cpu", enable_sleep_mode=True, num_kv_blocks=64) as llm:
        yield llm.engine


def test_weights_come_back_by_tags(sleeper: DynamicInferenceEngine) -> None:
    """Colocated training: the weights first, then an update of them, then the cache."""
    engine = sleeper
    weights = dict(engine.controller.inference_wrapped_model.model.named_parameters())
    trained = [(name, weight.clone()) for name, weight in weights.items()]
    wanted = [request.generated_tokens for request in engine.generate(PROMPTS, greedy(6))]
    future, before = engine.add_request(9, PROMPTS[0], greedy(6)), addresses(engine)
    engine.step_modern()
    update = engine.begin_weight_update(5, names="megatron")
    update.load(trained)
    engine.suspend(free=(KV, WEIGHTS))
    assert not any(weight.any() for weight in weights.values())
    writes = partial(engine.update_weights, trained, 6, names="megatron")
    in_place = partial(engine.updating.write_in_place, 9, engine)
    for write in (update.finish, writes, in_place, engine.weights_open(6).__enter__):
        with pytest.raises(UpdateError, match=r"is given back: call resume\(\['weights'\]\) first"):
            write()
    engine.resume([WEIGHTS])
    assert engine.state is EngineState.SUSPENDED
    with pytest.raises(EngineStopped, match=r"call resume\(\) first"):
        engine.generate(PROMPTS, greedy(6))
    engine.resume([KV])
    engine.begin_weight_update(6, names="megatron", staging="none").drop()
    with pytest.raises(UpdateError, match=r"not whole .*send all of them"):
        engine.update_weights(trained, 6, names="megatron", partial=True)
    with pytest.raises(EngineStopped, match=r"weights have come \(.*\): finish"):
        engine.generate(PROMPTS, greedy(6))
    writes()
    drain(engine)
    assert future.result().generated_tokens == wanted[0]
    assert engine.stats()["recomputed_tokens"] > 0
    assert addresses(engine) == before
    # The update may also come before the cache.
    engine.suspend(free=(KV, WEIGHTS))
    engine.resume(WEIGHTS)
    writes()
    engine.resume()
    assert [request.generated_tokens for request in engine.generate(PROMPTS, greedy(6))] == wanted


def test_weights_lie_apart_and_aligned(sleeper: DynamicInferenceEngine, monkeypatch) -> None:
    parameters = [*sleeper.controller.inference_wrapped_model.model.parameters()]
    ends = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters)
    assert all(first[1] <= second[0] for first, second in pairwise(ends))
    assert not any(p.data_ptr() % 512 for p in parameters)
    monkeypatch.setattr(pools, "ROOM", 1000)  # most parameters are larger
    layers = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(4)))
    moved = pools.move_weights(layers, sleeper.context.device)
    assert len(moved._own) == 4  # a weight and its bias in each
    layers.load_state_dict({name: torch.ones_like(w) for name, w in layers.state_dict().items()})
    assert moved.release() == 4 * 4096
    assert not any(weight.any() for weight in layers.parameters())


def test_what_is_asked_in_a_wrong_order_or_by_a_wrong_name() -> None:
    engine = make_engine(make_model())
    engine.resume()
    engine.resume([KV])
    assert engine.state is EngineState.RUNNING
    for call in (engine.suspend, engine.resume):
        with pytest.raises(ConfigurationError, match="'cache' is no memory: use kv_cache or wei"):
            call(**{"free" if call == engine.suspend else "tags": ["cache"]})
        with pytest.raises(ConfigurationError, match="enable_sleep_mode=True, or free only"):
            call(**{"free" if call == engine.suspend else "tags": WEIGHTS})
    assert engine.state is EngineState.RUNNING, "nothing has happened"
    with pytest.raises(ConfigurationError, match=r"copies=\['kv_cache'\] is not given back"):
        engine.suspend(copies=[KV])
    assert engine.suspend(free=KV) > 0
    assert engine.suspend(free=[KV], copies=[KV]) == engine.suspend(free_kv_cache=True) == 0
    engine.resume()
    engine.resume()
    assert len(engine.generate(PROMPTS, greedy(3))) == 3


def test_no_copy_stays_without_the_others(
    sleeper: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = sleeper.context.memories
    free = type("Free", (), {"available": memories[WEIGHTS].num_bytes})
    monkeypatch.setattr(pools.psutil, "virtual_memory", lambda: free)
    with pytest.raises(OutOfMemoryError):
        sleeper.suspend(free=[WEIGHTS, KV], copies=[WEIGHTS, KV])
    assert not any(memory._copies for memory in memories.values())


def test_a_copy_that_does_not_fit_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_model())
    future = engine.add_request(0, PROMPTS[1], PARAMS[1])
    for _ in range(3):
        engine.step_modern()
    free = type("Free", (), {"available": 1 << 10})
    monkeypatch.setattr(pools.psutil, "virtual_memory", lambda: free)
    with pytest.raises(OutOfMemoryError, match=r"on the host takes .* GiB, but 9\.54e-07 GiB"):
        engine.suspend(free=[KV], copies=[KV])
    monkeypatch.undo()
    assert engine.state is EngineState.SUSPENDED
    assert not engine.context.gpu_view.pools._copies
    engine.resume()
    drain(engine)
    assert len(future.result().generated_tokens) == 24
    assert engine.stats()["recomputed_tokens"] == 0


@pytest.mark.parametrize("copies", [(), (KV,)])
def test_memory_that_cannot_be_had_again(monkeypatch: pytest.MonkeyPatch, copies: Any) -> None:
    """The second of three ranges: the first one is given back again, and the copy is kept."""
    engine = make_engine(make_model(), enable_sleep_mode=True)
    future = engine.add_request(0, PROMPTS[1], PARAMS[1])
    for _ in range(3):
        engine.step_modern()
    engine.suspend(free=[KV], copies=copies)
    taken: list[CpuOwnMemory] = []

    def take(own: CpuOwnMemory) -> None:
        taken.append(own)
        own.tensor[:1].fill_(1)
        if len(taken) == 2:
            raise OutOfMemoryError("the GPU has no 0.5 GiB left")

    monkeypatch.setattr(CpuOwnMemory, "take", take)
    with pytest.raises(OutOfMemoryError, match=r"0\.5 GiB"):
        engine.resume()
    assert len(taken) == 2
    assert taken[0]._resident() == 0
    assert engine.state is EngineState.SUSPENDED
    with pytest.raises(EngineStopped, match=r"call resume\(\) first"):
        engine.generate(PROMPTS, greedy(3))
    monkeypatch.undo()
    engine.resume()
    drain(engine)
    wanted = make_engine(make_model(), lookahead=0).generate([PROMPTS[1]], [PARAMS[1]])
    assert future.result().generated_tokens == wanted[0].generated_tokens
    assert (engine.stats()["recomputed_tokens"] == 0) is bool(copies)
