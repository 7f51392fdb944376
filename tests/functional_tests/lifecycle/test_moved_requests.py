"""Requests move between engines as plain data: what comes after is what would have come; hostile
data; requests that outlive too many weights."""

import asyncio
import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_async import DynamicInferenceEngine, SamplingParams, StructuredOutput
from megatron_async.errors import RequestError
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import load_recording
from megatron_async.lab.replay import Replay
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.leader import Leader
from megatron_async.requests.request_registry import Status
from tests.functional_tests.features.test_routing_record import EXPERTS
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.harness import (
    EngineFactory,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
)
from tests.support.letter_tokenizers import Pieces
from tests.support.memory_channel import MemoryChannel
from tests.support.patience import PATIENCE_S

PROMPTS = random_prompts(6, [3, 40, 9], VOCABULARY)
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.9, "top_k": 40},
    "penalties": {"temperature": 1.2, "frequency_penalty": 0.9, "bad_words": [[3, 4], [9]]},
    "log probs": {"return_log_probs": True, "top_n_logprobs": 2, "temperature": 0.7},
    "stop word": {"temperature": 1.1, "stop_words": ["zzzz", "qqqq"], "min_tokens": 2},
    "grammar": {"temperature": 1.0, "structured_output": StructuredOutput(regex="[a-d]{100}")},
}


def lettered(**settings: Any) -> DynamicInferenceEngine:
    """An engine with text."""
    return make_engine(AttentionModel(), tokenizer=Pieces(), max_sequence_length=128, **settings)


def params_of(kind: str) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=24, termination_id=-1, **KINDS[kind])


def step(engine: DynamicInferenceEngine, tokens: int, request_id: int = 7) -> None:
    while engine.get_request(request_id).generated_length < tokens:
        engine.context.slots.keep_tokens()
        engine.step_modern()


def over_the_wire(data: dict[str, Any], codec: Any) -> dict[str, Any]:
    return codec.loads(codec.dumps(data)) if codec is json else codec.decode(codec.encode(data))


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_request_says_what_it_would_have_said(lookahead: int, kind: str) -> None:
    """Twice, with steps in flight. Break `MovedRequest.of`: leave the seed out."""
    engines = [lettered(lookahead=lookahead) for _ in range(3)]
    future = engines[0].add_request(7, PROMPTS[1], params_of(kind))
    drain(engines[0])
    wanted = future.result()
    assert wanted.error is None
    engines[0].add_request(7, PROMPTS[1], params_of(kind))
    step(engines[0], 5)
    data = engines[0].export_request(7)
    assert len(data["generated"]) >= 5
    engines[1].import_request(8, over_the_wire(data, json))
    step(engines[1], 11, 8)
    data = engines[1].export_request(8)
    future = engines[2].import_request(9, over_the_wire(data, msgspec.msgpack))
    drain(engines[2])
    found = future.result()
    assert found.error is None, found.error
    for name in ("generated_tokens", "generated_text", "finish_reason", "prompt_text"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("generated_log_probs", "prompt_log_probs"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=1e-4), name
    for engine in engines[:2]:
        drain(engine)


def test_it_moves_before_its_first_step() -> None:
    """Break `RequestLogProbs.restore`: let NumPy find the width of no rows."""
    engine = lettered()
    engine.add_request(7, PROMPTS[1], params_of("log probs"))
    future = engine.import_request(8, engine.export_request(7))
    drain(engine)
    assert len(future.result().prompt_log_probs) == len(PROMPTS[1]) - 1


def test_half_a_prompt_is_computed_again() -> None:
    """The other engine's weights may be others. Break `MovedRequest.of`: keep its rows."""
    first, second = (make_engine(make_model(seed=seed), max_tokens=16) for seed in (0, 3))
    (wanted,) = second.score([PROMPTS[1]])
    first.add_request(7, PROMPTS[1], SamplingParams().scoring())
    first.step_modern()
    first.step_modern()
    future = second.import_request(8, first.export_request(7))
    drain(first)
    drain(second)
    assert future.result().prompt_log_probs == pytest.approx(wanted.prompt_log_probs, abs=1e-4)


def test_forced_routing_moves() -> None:
    """Break `MovedRequest.read`: leave its bytes as base64."""
    first, second = (make_engine(make_model(EXPERTS), enable_routing_replay=True) for _ in range(2))
    forced = [[[3, 6], [7, 1]], [[0, 2], [-1, -1]], [[1, 4], [5, 2]]]
    params = greedy(9, forced_routing=forced)
    (wanted,) = first.generate([[1, 2, 3]], params)
    first.add_request(7, [1, 2, 3], params)
    step(first, 3)
    future = second.import_request(7, over_the_wire(first.export_request(7), json))
    drain(second)
    drain(first)
    assert future.result().generated_tokens == wanted.generated_tokens
    assert (future.result().routing_indices == wanted.routing_indices).all()


def test_its_stream_goes_on() -> None:
    first, second = (lettered() for _ in range(2))
    params = params_of("stop word")
    future = first.add_request(7, PROMPTS[0], params)
    drain(first)
    wanted = future.result()

    async def read(engine: DynamicInferenceEngine, request_id: int) -> tuple[list[int], str]:
        chunks = [chunk async for chunk in engine.stream(request_id)]
        return [t for each in chunks for t in each.tokens], "".join(each.text for each in chunks)

    async def move() -> tuple[tuple[list[int], str], tuple[list[int], str]]:
        first.add_request(7, PROMPTS[0], params)
        reader = asyncio.create_task(read(first, 7))
        await asyncio.sleep(0)
        for _ in range(9):
            await first.async_step()
        second.import_request(3, first.export_request(7))
        other = asyncio.create_task(read(second, 3))
        await asyncio.sleep(0)
        while second.has_unfinished_requests():
            await second.async_step()
        return await reader, await other

    (tokens, text), (more, rest) = asyncio.run(move())
    assert tokens
    assert tokens + more == wanted.generated_tokens
    assert text + rest == wanted.generated_text
    drain(first)


def test_a_request_that_waits_moves_too(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine(max_requests=1)
    wanted = engine.generate([PROMPTS[1]], greedy(6, seed=1, temperature=1.0))[0]
    running = engine.add_request(1, PROMPTS[0], greedy(6))
    waiting = engine.add_request(2, PROMPTS[1], greedy(6, seed=1, temperature=1.0))
    engine.step_modern()
    data = engine.export_request(2)
    ended = waiting.result()
    assert (ended.status, ended.finish_reason, ended.error) == (Status.COMPLETED, "moved", None)
    future = engine.import_request(2, data)
    drain(engine)
    assert future.result().generated_tokens == wanted.generated_tokens
    assert running.result().finish_reason == "length"
    with pytest.raises(KeyError):
        engine.export_request(2)


def test_followers_and_replays_import_it_too(
    make_tiny_engine: EngineFactory, tmp_path: Any
) -> None:
    """Half of the prompt's log probs are delivered, which a plan depends on."""
    engine, file = make_tiny_engine(max_tokens=16), tmp_path / "moved.rec"
    params = greedy(9, return_log_probs=True, stop_token_ids=[1, 2])
    engine.add_request(7, PROMPTS[1], params)
    engine.step_modern()
    engine.step_modern()
    data = engine.export_request(7)
    drain(engine)
    channel = MemoryChannel()
    leader, follower = (make_engine(make_model(), max_tokens=16) for _ in range(2))
    leader.loop.join(Leader(channel, channel.check, True))
    follower.loop.join(Follower(channel, channel.check, check_agreement=True))
    recorder = Recorder(leader, file)
    thread = threading.Thread(target=follower.follow)
    thread.start()
    future = leader.import_request(3, data)
    drain(leader)
    recorder.close()
    leader.close()
    thread.join(PATIENCE_S)
    assert len(future.result().prompt_log_probs) == len(PROMPTS[1]) - 1
    assert follower.statistics.steps == leader.statistics.steps
    assert Replay(load_recording(file)).run() == leader.statistics.steps
    follower.close()


def with_alternative(log_probs: str, token: int) -> str:
    """Booked log probs whose first alternative is another token."""
    words = np.frombuffer(b64decode(log_probs), "<i4").copy()
    words[1] = token
    return b64encode(words.tobytes()).decode()


SPOILS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda d: d | {"format": "megatron_async request 2"},
    "an unknown field": lambda d: d | {"run": "it"},
    "no prompt": lambda d: {k: v for k, v in d.items() if k != "prompt"},
    "a text for tokens": lambda d: d | {"generated": "abc"},
    "no dict": lambda d: [d],
    "params of another kind": lambda d: d | {"params": {**d["params"], "seed": "x"}},
    "an unknown parameter": lambda d: d | {"params": {**d["params"], "__class__": "os.system"}},
    "params that are none": lambda d: d | {"params": 3},
    "log probs that are no base64": lambda d: d | {"log_probs": "\u00e4"},
}
MISFITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a token out of range": lambda d: d | {"generated": [*d["generated"][:-1], 5000]},
    "a negative token": lambda d: d | {"prompt": [-4]},
    "a token of 100 bits": lambda d: d | {"prompt": [2**100]},
    "no tokens": lambda d: d | {"prompt": []},
    "more tokens than log probs": lambda d: d | {"generated": [*d["generated"], 5]},
    "log probs of a longer prompt": lambda d: d | {"prompt_log_probs": "AAAA" * 3000},
    "an alternative of another vocabulary": lambda d: (
        d | {"log_probs": with_alternative(d["log_probs"], VOCABULARY)}
    ),
    "a negative alternative of the prompt": lambda d: (
        d | {"prompt_log_probs": with_alternative(d["prompt_log_probs"], -1)}
    ),
    "log probs that nobody asked for": lambda d: (
        d | {"params": {**d["params"], "return_log_probs": False, "top_n_logprobs": 0}}
    ),
    "more tokens than it may have": lambda d: d | {"generated": [5] * 100, "log_probs": ""},
    "a sequence beyond the engine's": lambda d: (
        d | {"params": {**d["params"], "num_tokens_to_generate": 10**6}}
    ),
    "a temperature": lambda d: d | {"params": {**d["params"], "temperature": -1}},
    "versions backwards": lambda d: d | {"versions": [[0, "a"], [4, "b"], [2, "c"]]},
    "versions from the middle": lambda d: d | {"versions": [[1, "a"]]},
    "versions beyond the end": lambda d: d | {"versions": [[0, "a"], [2**40, "b"]]},
    "an end among its tokens": lambda d: (
        d | {"params": {**d["params"], "stop_token_ids": [d["generated"][2]]}}
    ),
    "a priority": lambda d: d | {"priority": 2**60},
}


@pytest.fixture
def exported() -> tuple[DynamicInferenceEngine, dict[str, Any]]:
    engine = lettered()
    engine.add_request(7, PROMPTS[0], params_of("log probs"))
    step(engine, 5)
    data = engine.export_request(7)
    drain(engine)
    return engine, data


def test_hostile_data_is_refused_and_nothing_else_is_lost(exported: Any) -> None:
    """Break `restore`: leave a check out."""
    engine, data = exported
    running = engine.add_request(1, PROMPTS[2], greedy(12))
    engine.step_modern()
    for name, spoil in SPOILS.items():
        spoiled = spoil(json.loads(json.dumps(data)))
        with pytest.raises(RequestError, match="no request that an engine has exported"):
            engine.import_request(2, spoiled)
        assert 2 not in engine.requests, name
    for name, spoil in MISFITS.items():
        future = engine.import_request(2, spoil(json.loads(json.dumps(data))))
        assert future.done(), name
        request = future.result()
        assert isinstance(request.error, RequestError), (name, request.error)
        engine.step_modern()
    future = engine.import_request(2, data)
    drain(engine)
    assert future.result().succeeded()
    assert running.result().succeeded()


def test_a_grammar_refuses_what_it_could_not_have_said() -> None:
    engine = lettered()
    engine.add_request(7, PROMPTS[0], params_of("grammar"))
    step(engine, 3)
    data = engine.export_request(7)
    data["params"]["structured_output"]["regex"] = "d{100}"
    future = engine.import_request(7, data)
    drain(engine)
    assert "the grammar does not allow token" in str(future.result().error)
    said = len(Pieces().detokenize(data["generated"]))
    data["params"]["structured_output"]["regex"] = f"[a-d]{{{said}}}"
    future = engine.import_request(7, data)
    drain(engine)
    assert "has ended" in str(future.result().error)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_stale_request_ends_with_what_it_has(lookahead: int, policy: str) -> None:
    """Updates count from a request's first token on. Break `_begin_again`: count none."""
    engine = make_engine(make_model(), lookahead=lookahead)
    weights = dict(make_model(seed=3).named_parameters())
    futures = [
        engine.add_request(lag, PROMPTS[0], greedy(30, max_version_lag=lag)) for lag in range(3)
    ]
    endless = engine.add_request(9, PROMPTS[0], greedy(30))
    engine.update_weights(weights.items(), 0, names="megatron", policy=policy)
    for version in (1, 2, 3):
        for _ in range(4):
            engine.step_modern()
        engine.update_weights(weights.items(), version, names="megatron", policy=policy)
    drain(engine)
    for lag, future in enumerate(futures):
        request = future.result()
        assert (request.finish_reason, request.error) == ("stale", None)
        assert 0 <= 4 * (lag + 1) - len(request.generated_tokens) <= lookahead * (lag + 1)
        assert len(request.weight_versions) == lag + 1
    assert endless.result().finish_reason == "length"
    engine.add_request(7, PROMPTS[0], greedy(30, max_version_lag=0))
    step(engine, 4)
    data = engine.export_request(7)
    other = make_engine(make_model())
    stale = other.import_request(7, data).result()
    drain(other)
    assert (stale.finish_reason, stale.generated_tokens) == ("stale", data["generated"])
    bad = engine.generate([PROMPTS[0]], greedy(3, max_version_lag=-1))[0]
    assert "max_version_lag=-1" in str(bad.error)
    drain(engine)
