"""New weights by the calls of an engine and of an `LLM`, on one rank and on several."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async import LLM, DynamicInferenceEngine
from megatron_async.devices import Chaos, CpuDevice
from megatron_async.errors import EngineStopped, UpdateError, WrongThread
from megatron_async.models.derived_copies import DerivedCopies
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.leader import Leader
from tests.support.harness import TINY, drain, greedy, make_engine, make_model, random_prompts
from tests.support.memory_channel import MemoryChannel
from tests.support.patience import PATIENCE_S
from tests.support.ranks import run_ranks

PROMPTS = random_prompts(5, (3, 40, 11))
NAMES = {"names": "megatron"}


def trained(seed: int, architecture: Any = TINY) -> Iterator[tuple[str, Tensor]]:
    """The weights of a trainer, large ones of norms too, which are folded."""
    for name, parameter in make_model(architecture, seed=seed).named_parameters():
        is_norm = "norm" in name
        yield name, parameter.detach() * (1 + 0.3 * seed) if is_norm else parameter.detach()


def fresh(seed: int) -> DynamicInferenceEngine:
    """An engine that began with these weights."""
    model = make_model()
    given = dict(trained(seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given[name])
    return make_engine(model)


def said(engine: Any, count: int = 8) -> list[list[int]]:
    found = [r.generated_tokens for r in engine.generate(PROMPTS, greedy(count))]
    drain(getattr(engine, "engine", engine))
    return found


@pytest.mark.parametrize("staging", ["device", "host", "direct", "none"])
def test_a_round_of_every_staging(staging):
    """Steps go on between two buckets, but with "none"."""
    engine = make_engine(make_model(), lookahead=2)
    future = engine.add_request(0, PROMPTS[0], greedy(20))
    update = engine.begin_weight_update("b", staging=staging, **NAMES)
    assert update.info["staging"] == staging
    tensors = list(trained(5))
    for tensor in tensors:
        update.load([tensor])
        if staging == "none":
            with pytest.raises(EngineStopped, match="written in place"):
                engine.generate(PROMPTS[:1])
        else:
            engine.step_modern()
    done = update.finish()
    drain(engine)
    assert (done.version, done.epoch, engine.weight_version) == ("b", 1, "b")
    versions = [version for version, *_ in future.result().weight_versions]
    assert versions == (["b"] if staging == "none" else [None, "b"])
    assert said(engine) == said(fresh(5))


def test_tensors_may_be_changed_behind_finish():
    for staging in ("device", "direct"):
        engine = make_engine(make_model(), device=CpuDevice(Chaos(3, probability=1.0)))
        tensors = list(trained(5))
        update = engine.begin_weight_update("b", staging=staging, **NAMES)
        update.load(tensors)
        update.finish()
        for _, tensor in tensors:
            tensor.fill_(7.0)
        assert said(engine) == said(fresh(5))


def test_a_copy_of_old_weights_is_found(monkeypatch):
    """The test above can fail: what follows from the weights is not made again."""
    engine = make_engine(make_model())
    monkeypatch.setattr(DerivedCopies, "refresh", lambda copies: False)
    engine.update_weights(trained(5), "b", **NAMES)
    wrong = said(engine)
    monkeypatch.undo()
    assert wrong != said(fresh(5))


def test_what_cannot_be_taken_leaves_the_old_weights():
    engine, expected = make_engine(make_model(), lookahead=1), None
    expected = said(engine)
    for tensors, options, message in (
        ([("nope", torch.ones(1))], {}, "'nope' is not part of this model"),
        (list(trained(5))[:3], {}, "was not sent in this round"),
        (list(trained(5)) * 2, {}, "was written twice"),
        ([], {"staging": "warp"}, "staging='warp' is unknown"),
        ([], {"policy": "wait"}, "policy='wait' is none of keep"),
    ):
        with pytest.raises(UpdateError, match=message):
            engine.update_weights(tensors, "b", **NAMES, **options)
    update = engine.begin_weight_update("b", **NAMES)
    update.load(trained(5))
    update.drop()
    with pytest.raises(UpdateError, match="has ended"):
        update.finish()
    assert said(engine) == expected
    assert (engine.weight_version, engine.weight_epoch) == (None, 0)
    assert not engine.has_unfinished_requests()


def test_a_torn_round_in_place_lets_nothing_run_until_a_whole_one():
    engine = make_engine(make_model())
    update = engine.begin_weight_update("b", staging="none", **NAMES)
    update.load(list(trained(5))[:4])
    update.drop()
    future = engine.add_request(0, PROMPTS[0], greedy(4))
    with pytest.raises(EngineStopped, match=r"until new weights have come .* were dropped"):
        engine.step_modern()
    with pytest.raises(UpdateError, match=r"not whole .* send all of them"):
        engine.begin_weight_update("b", partial=True)
    engine.update_weights(trained(5), "b", **NAMES)
    drain(engine)
    assert future.result().weight_versions == [("b", 0, 4)]
    assert said(engine) == said(fresh(5))
    # One that wrote nothing tears nothing.
    engine.begin_weight_update("c", staging="none", **NAMES).drop()
    assert said(engine) == said(fresh(5))


def test_rounds_that_are_open_together_know_nothing_of_each_other():
    engine = make_engine(make_model())
    first, second = (engine.begin_weight_update(version, **NAMES) for version in "ab")
    first.load(trained(5))
    second.drop()
    assert first.finish().version == "a"
    first.drop()  # it has ended
    third = engine.begin_weight_update("c", staging="none", **NAMES)
    third.load(list(trained(7))[:2])
    with pytest.raises(UpdateError, match="being written in place"):
        engine.begin_weight_update("d", staging="none", **NAMES)
    third.drop()
    # One that wrote nothing mends nothing.
    engine.begin_weight_update("e", staging="none", **NAMES).drop()
    with pytest.raises(EngineStopped, match="until new weights"):
        engine.generate(PROMPTS)
    for version in (["f"], True, 1.5):
        with pytest.raises(UpdateError, match="must be a text or an integer"):
            engine.begin_weight_update(version, **NAMES)
    assert engine.update_weights(trained(7), "g", **NAMES).version == "g"
    late = engine.begin_weight_update("h", **NAMES)
    late.load(trained(5))
    engine.close()
    with pytest.raises((EngineStopped, UpdateError), match="closed"):
        late.finish()
    late.drop()


def test_nothing_lets_steps_run_while_weights_are_written_in_place():
    """Another round's end, an update inside of weights_open, a round that nobody has any more."""
    engine = make_engine(make_model())
    staged = engine.begin_weight_update("a", **NAMES)
    part = engine.begin_weight_update("b", partial=True, **NAMES)
    in_place = engine.begin_weight_update("c", staging="none", **NAMES)
    for update in (staged, in_place):
        update.load(list(trained(5))[:3] if update is in_place else trained(7))
    with pytest.raises(UpdateError, match="being written in place"):
        staged.finish()
    assert engine.updating.torn == ""
    del update, in_place
    with pytest.raises(EngineStopped, match="begin another that brings all"):
        engine.generate(PROMPTS)
    with pytest.raises(UpdateError, match="not whole"):
        part.finish()
    with engine.weights_open("d"), pytest.raises(UpdateError, match="being written in place"):
        engine.update_weights(trained(5), "e", **NAMES)
    engine.update_weights(trained(5), "f", **NAMES)
    assert said(engine) == said(fresh(5))
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        engine.update_weights(trained(7), "g", **NAMES)
    with pytest.raises(EngineStopped, match="closed"), engine.weights_open("h"):
        pass


def test_a_thread_that_waits_for_one_that_serves_no_more_goes_on():
    engine, started, go_on = make_engine(make_model()), threading.Event(), threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        task = asyncio.create_task(engine.run_engine())
        await asyncio.sleep(0.01)
        started.set()
        go_on.wait(PATIENCE_S)  # meanwhile nothing runs here
        task.cancel()

    update = lambda: found.append(engine.update_weights(trained(5), "b", **NAMES))  # noqa: E731
    threads = [
        threading.Thread(target=asyncio.run, args=(serve(),)),
        threading.Thread(target=update),
    ]
    for thread in threads:
        thread.start()
        assert started.wait(PATIENCE_S)
    while not engine.updating.is_due:
        threads[1].join(0.005)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert found[0].version == "b"


def test_weights_that_a_trainer_changes_in_place():
    engine = make_engine(make_model(), lookahead=2)
    model = engine.controller.inference_wrapped_model.model
    future = engine.add_request(0, PROMPTS[0], greedy(12))
    for _ in range(4):
        engine.step_modern()
    given = dict(trained(5))

    def step() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(given[name])

    with engine.weights_open("b"):
        step()
        launched = engine.context.slots.at_least(0) - len(PROMPTS[0])
        assert engine.launch_step() is None
    drain(engine)
    assert future.result().weight_versions == [(None, 0, launched), ("b", launched, 12)]
    assert said(engine) == said(fresh(5))
    with pytest.raises(ZeroDivisionError), engine.weights_open("c"):
        raise ZeroDivisionError
    with pytest.raises(EngineStopped, match="'c' broke off: ZeroDivisionError"):
        engine.generate(PROMPTS)
    with engine.weights_open("d", "recompute"):
        step()
    assert said(engine) == said(fresh(5))
    assert engine.weight_version == "d"


def test_a_thread_beside_the_one_that_serves():
    engine, found = make_engine(make_model(), lookahead=1), []
    has_begun, ends = threading.Event(), threading.Event()

    async def serve() -> None:
        task = asyncio.create_task(engine.run_engine())
        future = engine.add_request(0, PROMPTS[0], greedy(400))
        await asyncio.sleep(0.01)
        has_begun.set()
        found.append(await future)
        await asyncio.to_thread(ends.wait, PATIENCE_S)
        task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert has_begun.wait(PATIENCE_S)
    done = engine.update_weights(trained(5), "b", **NAMES)
    with pytest.raises(WrongThread):
        engine.begin_weight_update("c", staging="none", **NAMES)
    assert done.version == engine.weight_version == "b"
    ends.set()
    thread.join(PATIENCE_S)
    assert [version for version, *_ in found[0].weight_versions] == [None, "b"]


def test_a_thread_that_generates_waits_for_one_that_commits():
    """Between two calls of `generate` the trainer's thread is at work in the engine."""
    engine, found = make_engine(make_model()), []
    tend = engine.loop.tend_updates
    other = threading.Thread(target=lambda: found.append(said(engine)))

    def slow() -> bool:
        if other.ident is None:
            other.start()
            other.join(0.05)
        return tend()

    engine.loop.tend_updates = slow  # type: ignore[method-assign]
    engine.update_weights(trained(5), "b", **NAMES)
    other.join(PATIENCE_S)
    assert found == [said(fresh(5))]


def test_every_rank_makes_the_same_calls():
    """In one process, on two threads; a tensor is wrong on one of the ranks, then on the other."""
    channel = MemoryChannel()
    leader, follower = make_engine(make_model()), make_engine(make_model())
    leader.loop.join(Leader(channel, channel.check, True))
    follower.loop.join(Follower(channel, channel.check, check_agreement=True))
    results: dict[Any, list[Any]] = {leader: [], follower: []}

    def work(engine: DynamicInferenceEngine) -> None:
        for number, bad in enumerate((None, leader, follower, None), 1):
            tensors = [("nope", torch.ones(1))] if bad is engine else trained(number)
            try:
                results[engine].append(engine.update_weights(tensors, number, **NAMES))
            except UpdateError as error:
                results[engine].append(error)
        with engine.weights_open("open"):
            pass
        if engine is leader:
            said(engine)
            engine.close()
        else:
            engine.follow()

    threads = [threading.Thread(target=work, args=(engine,)) for engine in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    for found in results.values():
        assert [found[0].version, found[3].version] == [1, 4]
        assert all("'nope' is not part of this model" in str(error) for error in found[1:3])
    assert leader.weight_version == follower.weight_version == "open"
    follower.close()


SIZES = [
    ("tiny", {"tensor_model_parallel_size": 2}),
    ("tiny-moe", {"expert_model_parallel_size": 2}),
]


def _rank(shape: str, sizes: dict[str, int], second: Any, third: Any) -> list[Any]:
    """An `LLM` of this shape, whose weights change between two calls; the last change fails on
    the last rank. What it said after each."""
    with LLM(f"dummy:{shape}", device="cpu", num_kv_blocks=64, **sizes) as llm:
        is_last = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        found: list[Any] = [_said(llm)]
        llm.update_weights(second, "b", **NAMES)
        found.append(_said(llm))
        try:
            wrong = [("nope", torch.ones(1))]
            llm.update_weights(wrong if is_last else third, 3, **NAMES)
        except UpdateError:
            found.append("failed")
        found.append(_said(llm))
        return [*found, llm.engine.weight_version]


def _said(llm: LLM) -> list[list[int]]:
    vocabulary = llm.engine.controller.vocab_size
    prompts = [[token % vocabulary for token in prompt] for prompt in PROMPTS]
    return [request.generated_tokens for request in llm.generate(prompts, greedy(6))]


@pytest.mark.parametrize(("shape", "sizes"), SIZES, ids=[shape for shape, _ in SIZES])
def test_ranks_of_an_llm(shape, sizes):
    # On a rank with others a model is built in parts.
    given = [list(trained(seed, DUMMY_SHAPES[shape])) for seed in (5, 7)]
    first, second, third, *_ = _rank(shape, {}, *given)
    assert first != second
    assert third != second
    for outcome in run_ranks(2, _rank, shape, sizes, *given):
        before, after, failed, again, version = outcome
        assert (failed, version) == ("failed", "b")
        if before:  # a follower returns nothing
            assert [before, after, again] == [first, second, second]
