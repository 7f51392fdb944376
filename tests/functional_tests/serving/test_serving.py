"""Replicas in processes of their own behind a coordinator: one engine's tokens, whichever dies.
Messages that are too large fail alone: questions, answers, and what a stranger sends."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.cli import main as cli
from megatron_async.errors import ConfigurationError, CoordinatorLost, RequestError
from megatron_async.server.fields.asked import Asked
from megatron_async.serving import connection, coordinator
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.messages import PROTOCOL, ClientHello, Ended, PromptLogProbs, Welcome
from megatron_async.serving.metrics import serve_coordinator_metrics
from megatron_async.serving.readers import TokenLogProbs
from megatron_async.serving.replica import Replica
from tests.support.cards import on_cards
from tests.support.harness import EngineFactory, greedy
from tests.support.open_sockets import listening, reachable
from tests.support.patience import PATIENCE_S, eventually
from tests.support.plain_peer import Peer
from tests.support.ranks import Ranks
from tests.support.served_demo import answer_of, asked_chat, asked_completion, demo
from tests.support.serving_processes import (
    ENGINE,
    LONG,
    Service,
    client_process,
    coordinator_process,
    long_sampling,
    replica_process,
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service("tcp://127.0.0.1:*")
    yield service
    service.close()


@pytest.fixture(scope="module")
def one_engine() -> Iterator[LLM]:
    with LLM("dummy:tiny", **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def long_answer(one_engine: LLM) -> list[int]:
    return one_engine.generate([1, 2, 3], long_sampling())[0].generated_tokens


def test_two_replicas_give_one_engines_tokens(service: Service, one_engine: LLM) -> None:
    check_answers(service, one_engine, 2)


@pytest.mark.parametrize("replicas", on_cards([1, 2, 4]))
def test_replicas_on_gpus_give_one_engines_tokens(replicas: int) -> None:
    service = Service("tcp://127.0.0.1:*", on_gpus=True)
    try:
        with LLM("dummy:tiny", **{**ENGINE, "device": "cuda:0"}) as one_engine:
            check_answers(service, one_engine, replicas)
    finally:
        service.close()


def check_answers(service: Service, one_engine: LLM, replicas: int) -> None:
    service.have(replicas)
    prompts = [[n + 1, 7, 3 * n] * (n + 1) for n in range(8)]
    params = [
        SamplingParams(seed=n, num_tokens_to_generate=12 + n, termination_id=-1) for n in range(8)
    ]
    params[2].frequency_penalty = 1.5
    params[3].logit_bias = {5: 4.0}
    params[4].return_log_probs = True
    params[5].stop_token_ids = list(range(0, 512, 5))
    expected = one_engine.generate(prompts, params)
    answers = service.client.generate(prompts, params)
    assert [a.generated_tokens for a in answers] == [e.generated_tokens for e in expected]
    assert [a.finish_reason for a in answers] == [e.finish_reason for e in expected]
    assert len(answers[4].generated_log_probs or []) == 16
    assert {a.replica for a in answers} == service.names()
    assert answers[0].error is None
    chunks = list(service.client.stream(prompts[6], params[6]))
    assert [t for chunk in chunks for t in chunk.tokens] == expected[6].generated_tokens
    assert len(chunks) > 3
    with pytest.raises(RequestError, match="out of range") as raised:
        service.client.generate([prompts[0], [10**6]], params[0])
    assert "raise_on_failure=False" in raised.value.__notes__[0]
    refused = service.client.generate([prompts[0], [10**6]], params[0], raise_on_failure=False)
    assert refused[0].error is None
    assert isinstance(refused[1].error, RequestError)
    assert "out of range" in str(refused[1].error)


def test_a_killed_replicas_stream_goes_on_elsewhere(service: Service, long_answer: list[int]):
    service.have(2)
    stream = service.client.stream([1, 2, 3], long_sampling())
    tokens = list(next(stream).tokens)
    victim = service.serving()
    service.signal(victim, signal.SIGKILL)
    eventually(lambda: victim not in service.names(), "the death to be noticed")
    for chunk in stream:
        tokens += chunk.tokens
    assert len(tokens) == LONG
    assert tokens == long_answer
    assert service.client.stats()["retried_requests"] >= 1


def test_a_moved_replicas_stream_goes_on(service: Service, long_answer: list[int], capsys):
    """By command, and when a second signal ends the replica at once."""
    service.have(2)
    before = service.client.stats()
    stream = service.client.stream([1, 2, 3], long_sampling())
    tokens = list(next(stream).tokens)
    left = service.serving()
    command = ["replicas", "--coordinator", service.address]
    assert cli.main([*command, "move", left]) == 0
    eventually(lambda: service.serving() != left, "the other one to go on")
    service.client.resume_replica(left)
    victim = service.serving()
    service.signal(victim, signal.SIGTERM)
    eventually(lambda: "leaving" in str(service.client.stats()["replicas"][victim]), "the first")
    service.signal(victim, signal.SIGTERM)
    for chunk in stream:
        tokens += chunk.tokens
    assert tokens == long_answer
    assert service.processes.pop(victim).join()[0].exit_code == 0
    after = service.client.stats()
    assert after["moved_requests"] == before["moved_requests"] + 2
    assert after["retried_requests"] == before["retried_requests"]


def test_a_hanging_replica_is_replaced_and_comes_back(service: Service, long_answer: list[int]):
    service.have(2)
    stream = service.client.stream([1, 2, 3], long_sampling())
    tokens = list(next(stream).tokens)
    victim = service.serving()
    service.signal(victim, signal.SIGSTOP)
    try:
        for chunk in stream:
            tokens += chunk.tokens
        assert tokens == long_answer
        assert victim not in service.names()
    finally:
        service.signal(victim, signal.SIGCONT)
    eventually(lambda: victim in service.names(), "the replica to join again")


def test_a_replica_of_two_ranks_loses_one(service: Service, long_answer: list[int]) -> None:
    """Tensor-parallel ranks are one replica; when one dies, the whole of it is lost."""
    service.have(0)
    pair = service.start(ranks=2)
    stream = service.client.stream([1, 2, 3], long_sampling())
    tokens = list(next(stream).tokens)
    service.processes[pair].kill(1)
    service.start()
    for chunk in stream:
        tokens += chunk.tokens
    assert tokens == long_answer
    assert pair not in service.names()
    leader = service.processes.pop(pair).join()[0]
    assert "RankLost" in leader.error


def test_a_paused_replica_stands_still_and_goes_on(service: Service, long_answer: list[int]):
    (name,) = service.have(1)
    stream = service.client.stream([1, 2, 3], long_sampling())
    tokens = list(next(stream).tokens)
    service.client.pause_replica(name)

    def steps() -> float:
        return float(service.client.stats()["replicas"][name]["engine"].get("steps", 0))

    time.sleep(0.3)
    before = steps()
    time.sleep(0.3)
    assert steps() == before
    service.client.resume_replica(name)
    for chunk in stream:
        tokens += chunk.tokens
    assert tokens == long_answer


def test_who_leaves_finishes_first(service: Service, long_answer: list[int]) -> None:
    """All ranks of a replica are signalled, as torchrun and terminals do."""
    service.have(0)
    name = service.start(ranks=2)
    stream = service.client.stream([1, 2, 3], long_sampling())
    tokens = list(next(stream).tokens)
    for rank in range(2):
        service.signal(name, signal.SIGTERM, rank)
    for chunk in stream:
        tokens += chunk.tokens
    assert tokens == long_answer
    for outcome in service.processes.pop(name).join():
        assert (outcome.exit_code, outcome.error) == (0, "")
    assert service.names() == set()


def test_a_dead_clients_requests_are_aborted(service: Service, tmp_path: Path) -> None:
    service.have(1)
    before = service.client.stats()["aborted_requests"]
    marker = tmp_path / "streaming"
    client = Ranks(1, client_process, service.address, str(marker))
    eventually(marker.exists, "the client to stream")
    assert service.client.stats()["unfinished_requests"] == 1
    client.kill(0)
    eventually(lambda: service.client.stats()["unfinished_requests"] == 0, "the abort")
    assert service.client.stats()["aborted_requests"] == before + 1
    # A reader that stops is one that aborts.
    stream = service.client.stream([1, 2, 3], long_sampling())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    eventually(lambda: service.client.stats()["aborted_requests"] == before + 2, "the abort")


def test_the_coordinator_dies_and_another_takes_its_place(tmp_path, long_answer: list[int]):
    address = f"ipc://{tmp_path}/coordinator"
    coordinator = Ranks(1, coordinator_process, address)
    replica = Ranks(1, replica_process, address, "only")
    with CoordinatorClient(address, connect_timeout_s=20) as client:
        stream = client.stream([1, 2, 3], long_sampling())
        next(stream)
        with pytest.raises(ConfigurationError, match="in use"):
            Coordinator(address)
        coordinator.kill(0)
        with pytest.raises(CoordinatorLost, match="its connection has ended"):
            list(stream)
        other = Ranks(1, coordinator_process, address)
        tokens = client.generate([1, 2, 3], long_sampling())[0].generated_tokens
        assert tokens == long_answer
        client.remove_replica("only")
        assert replica.join()[0].exit_code == 0
        other.kill(0)


def test_command_line_and_metrics(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = service.have(1)
    arguments = ["replicas", "--coordinator", service.address]
    assert cli.main([*arguments, "drain", name]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[:2] == [name, "draining"]
    assert cli.main([*arguments, "resume", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"][name]["state"] == "ready"
    assert cli.main([*arguments, "remove", "nobody"]) == 2
    assert f"there are: {name}" in capsys.readouterr().err
    assert cli.main([*arguments, "pause"]) == 2
    with pytest.raises(ValueError, match="no replica named 'nobody'"):
        service.client.pause_replica("nobody")
    wanted = f'megatron_async_coordinator_replica_free_blocks{{replica="{name}"}}'
    text = ""
    with serve_coordinator_metrics(service.coordinator, 0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        while wanted not in text:
            time.sleep(0.05)  # it tells what was so at the last ping
            text = urllib.request.urlopen(url).read().decode()
        whole = psutil.Process()  # coordinator, metrics, client, and replicas as children
        assert f"127.0.0.1:{server.port}" in listening(whole)["tcp"]
        assert reachable(listening(whole)) == []
    assert 'megatron_async_coordinator_requests_total{outcome="retried"}' in text


def test_a_coordinator_from_the_command_line() -> None:
    command = [sys.executable, "-m", "megatron_async", "coordinator", "--bind"]
    process = subprocess.Popen([*command, "tcp://127.0.0.1:*"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    with CoordinatorClient(address) as client:
        assert client.stats()["replicas"] == {}
    again = subprocess.run([*command, address], capture_output=True, text=True)
    assert again.returncode == 2
    assert "choose another" in again.stderr
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:99999", "a port of at most 65535"),
        ("127.0.0.1:9500", "did you mean tcp://127.0.0.1:9500?"),
        ("tcp://127.0.0.1", "a host and a port"),
        ("nonsense", "write it as tcp://"),
        ("ipc://", "write it as tcp://"),
    ],
)
def test_what_is_no_address(address: str, message: str) -> None:
    for who in (Coordinator, CoordinatorClient):
        with pytest.raises(ConfigurationError, match="is no address") as error:
            who(address)
        assert address in str(error.value)
        assert message in str(error.value)


def test_an_address_of_another_host() -> None:
    with pytest.raises(ConfigurationError, match="this host has no such address") as error:
        Coordinator("tcp://192.0.2.1:9501")
    assert "stop what uses it" not in str(error.value)


def test_nobody_there() -> None:
    with pytest.raises(CoordinatorLost, match="no coordinator answers"):
        CoordinatorClient("tcp://127.0.0.1:9", connect_timeout_s=0.3)
    with pytest.raises(ConfigurationError, match="no address"):
        CoordinatorClient("nonsense")


LIMIT = 20_000


@pytest.fixture
def served(make_tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A coordinator with a replica, whose messages may have `LIMIT` bytes, and its client."""
    for module in (connection, coordinator):
        monkeypatch.setattr(module, "MOST_BYTES", LIMIT)
    service = Coordinator("tcp://127.0.0.1:*")
    threads = [threading.Thread(target=service.run, daemon=True)]
    engine = make_tiny_engine(lookahead=1)
    replica = Replica(engine, service.address, "tiny", "a")
    threads.append(threading.Thread(target=lambda: asyncio.run(replica.run()), daemon=True))
    for thread in threads:
        thread.start()
    with CoordinatorClient(service.address) as client:
        yield service.address, client
        client.remove_replica("a")
        threads[1].join(PATIENCE_S)
    service.stop()
    threads[0].join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


def test_they_fail_alone(served: Any) -> None:
    _, client = served
    with pytest.raises(RequestError, match=f"takes .* bytes, and a message may have {LIMIT}"):
        client.generate([[1] * LIMIT], greedy(1))
    long_answer = greedy(1, return_log_probs=True, top_n_logprobs=20, skip_prompt_log_probs=False)
    large, small = client.generate(
        [[1, 2, 3] * 60, [1, 2, 3]], [long_answer, greedy(4)], raise_on_failure=False
    )
    assert isinstance(large.error, RequestError)
    assert "the answer cannot be sent" in str(large.error)
    assert small.error is None
    assert len(small.generated_tokens) == 4


def test_a_stranger_is_cut_off(served: Any) -> None:
    address, client = served
    stranger = Peer(address)
    stranger.say(ClientHello(PROTOCOL))
    stranger.hear(Welcome)
    stranger.say(b"x" * (LIMIT + 1))
    assert stranger.is_cut_off()
    stranger.close()
    (answer,) = client.generate([[4, 5]], greedy(3))
    assert len(answer.generated_tokens) == 3


CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", max_sequence_length=512)


def said(llm: LLM, asked: Asked) -> dict[str, Any]:
    answer = answer_of(asked, is_stream=False)
    prompts = [asked.prompts[one.prompt] for one in asked.choices]
    results = llm.generate(prompts, [one.params for one in asked.choices])
    for choice, result in zip(answer.choices, results):
        log_probs = prompt_log_probs = None
        if result.log_probs is not None:
            log_probs = TokenLogProbs(np.array(result.log_probs.generated(), np.float32))
            prompt = result.log_probs.prompt()
            if prompt is not None:
                prompt_log_probs = PromptLogProbs(0, np.array(prompt, np.float32).tobytes())
        choice.push(result.generated_tokens, log_probs)
        choice.end(
            Ended(
                0,
                result.finish_reason,
                num_prompt_tokens=len(result.prompt_tokens),
                stop_words_from=result.stop_words_from,
                prompt_log_probs=prompt_log_probs,
            )
        )
        if not asked.style.is_scoring and asked.style.id.startswith("cmpl-"):
            found = choice.whole()["text"]
            assert found == result.generated_text
    found = json.loads(answer.body())
    assert isinstance(found, dict)
    return found


def test_a_forced_call_of_a_small_model_is_a_call(llm: LLM) -> None:
    asked = asked_chat(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, seed=1)
    choice = said(llm, asked)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"
    assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")


def test_seeds_stop_words_and_defaults(llm: LLM) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a time", "seed": 3, "max_tokens": 12}
    fields["temperature"] = 1
    both = said(llm, asked_completion(n=2, **fields))["choices"]
    second = said(llm, asked_completion(**(fields | {"seed": 4})))["choices"][0]
    assert both[0]["text"] != both[1]["text"] == second["text"]
    greedy = said(llm, asked_completion(prompt="One, two,", top_p=0, max_tokens=8))
    text = greedy["choices"][0]["text"]
    assert text == said(llm, asked_completion(prompt="One, two,", temperature=0, max_tokens=8))[
        "choices"][0]["text"]  # fmt: skip
    word = text[3:6]
    asked = asked_completion(prompt="One, two,", temperature=0, max_tokens=8, stop=word)
    cut = said(llm, asked)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(word)], "stop")


def test_scoring_is_the_log_probs_of_the_prompt(llm: LLM) -> None:
    ids = [list(demo().tokenizer.tokenize("The capital of France is Paris"))]  # type: ignore[union-attr]
    asked = asked_completion(prompt=ids, echo=True, logprobs=0, max_tokens=0)
    found = said(llm, asked)["choices"][0]["logprobs"]
    expected = llm.generate(ids, asked.choices[0].params)[0].prompt_log_probs
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(expected)
    assert "".join(found["tokens"]) == "The capital of France is Paris"
