"""Megatron's client, coordinator and engine states over this project's service."""

import asyncio
from typing import Any

import msgspec
import psutil
import pytest
import torch
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status

from megatron_async.compat.conversions.coordinated_states import CoordinatedStates, Signal
from megatron_async.compat.inference.inference_client import InferenceClient, _Reply
from megatron_async.errors import ConfigurationError, EngineStopped, RequestError, UpdateError
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.messages import Ended
from tests.support.compat_trio import PROMPTS, compat_engine, drive, greedy_params
from tests.support.open_sockets import listening, reachable
from tests.support.patience import PATIENCE_S

LONGEST_S = 30


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LONGEST_S))


async def stop(client: InferenceClient, engine: Any) -> None:
    """The end of Megatron's example."""
    client.pause_engines()
    await engine.wait_until(EngineState.PAUSED)
    client.stop_engines()
    await engine.wait_until(EngineState.STOPPED)
    await engine.engine_loop_task
    client.shutdown_coordinator()
    client.stop()


def test_requests_come_back_as_from_the_engine_itself(tiny_model: torch.nn.Module) -> None:
    params = greedy_params(12, return_log_probs=True, top_n_logprobs=2)
    with compat_engine(tiny_model) as engine:
        expected = drive(engine, PROMPTS, params)

    async def use() -> list[DynamicInferenceRequest]:
        address = await engine.start_listening_to_data_parallel_coordinator()
        assert engine.state is EngineState.RUNNING
        found = listening(psutil.Process())
        assert address.removeprefix("tcp://") in found["tcp"]
        # On a thread: this loop answers at its sockets.
        assert await asyncio.to_thread(reachable, found) == []
        client = InferenceClient(address, deserialize=True)
        client.start()
        answers = await asyncio.gather(*(client.add_request(p, params) for p in PROMPTS))
        refused = await client.add_request(PROMPTS[0], greedy_params(4, temperature=-1.0))
        assert refused.status is Status.FAILED
        raw = InferenceClient(address)
        raw.start()
        known = await raw.add_request([*b"hello"], params)
        assert isinstance(known, dict)
        assert known["status"] == "COMPLETED"
        raw.stop()
        await stop(client, engine)
        assert client.completion_futures == {}
        return list(answers)

    with compat_engine(tiny_model) as engine:
        answers = run(use())
        assert engine.state is EngineState.STOPPED
    for number, (found, wanted) in enumerate(zip(answers, expected, strict=True)):
        assert found.request_id == number
        assert found.status is Status.COMPLETED
        assert found.generated_tokens == wanted.generated_tokens
        assert found.prompt == wanted.prompt
        assert found.generated_text == wanted.generated_text
        # Requests come in batches of other shapes here: equal up to rounding.
        assert found.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-5)
        assert found.prompt_log_probs == pytest.approx(wanted.prompt_log_probs, abs=1e-5)
        tops = zip(found.generated_top_n_logprobs, wanted.generated_top_n_logprobs, strict=True)
        assert all(mine == pytest.approx(theirs, abs=1e-5) for mine, theirs in tops)
        assert found.prompt_tokens is None  # Megatron sends them where return_prompt_tokens asks
        assert [event.type for event in found.events] == [event.type for event in wanted.events]
        assert found.latency > 0


def test_an_end_that_cannot_be_read_reaches_its_waiter() -> None:
    async def use() -> None:
        future = asyncio.get_running_loop().create_future()
        _Reply(1, future, False).hear_end(Ended(0, "length", record=b"\xc1"))
        with pytest.raises(msgspec.DecodeError):
            await asyncio.wait_for(future, PATIENCE_S)

    run(use())


def test_states_change_when_all_engines_have_done_it(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        expected = drive(engine, PROMPTS, greedy_params(40))

    async def use() -> list[Any]:
        address = await engine.start_listening_to_data_parallel_coordinator()
        client = InferenceClient(address, deserialize=True)
        client.start()
        seen = []
        confirm = engine.coordinated.confirm

        def note(signal: Signal) -> None:
            before = engine.state
            confirm(signal)
            if engine.state is not before:
                seen.append(before)

        engine.coordinated.confirm = note
        futures = [client.add_request(prompt, greedy_params(40)) for prompt in PROMPTS]
        client.suspend_engines()  # ignored: they are not paused
        client.set_generation_epoch(3)
        client.pause_engines()
        await engine.wait_until(EngineState.PAUSED)
        client.pause_engines()  # stands still already
        assert not any(future.done() for future in futures)
        client.suspend_engines()
        await engine.wait_until(EngineState.SUSPENDED)
        assert engine.state is EngineState.SUSPENDED
        client.resume_engines()
        await engine.wait_until(EngineState.RESUMED)
        assert engine.state is EngineState.PAUSED
        late = client.add_request(PROMPTS[0], greedy_params(40))
        await asyncio.sleep(0.05)
        assert not any(future.done() for future in futures)
        client.unpause_engines()
        await engine.wait_until(EngineState.RUNNING)
        answers = await asyncio.gather(*futures)
        assert (await late).generated_tokens == answers[0].generated_tokens
        assert {answer.policy_epoch[-1][1] for answer in answers} == {3}
        client.pause_engines()
        await engine.wait_until(EngineState.PAUSED)
        doomed = client.add_request(PROMPTS[0], greedy_params(4))
        await stop(client, engine)
        assert doomed.cancelled()
        assert [state.name for state in seen] == [
            "PAUSING", "SUSPENDING", "RESUMING", "UNPAUSING", "PAUSING", "STOPPING",
        ]  # fmt: skip
        with pytest.raises(ValueError, match="passes by"):
            await engine.wait_until(EngineState.PAUSING)
        return answers

    with compat_engine(tiny_model) as engine:
        answers = run(use())
    assert [a.generated_tokens for a in answers] == [e.generated_tokens for e in expected]


def test_an_engine_comes_back_after_a_stop(tiny_model: torch.nn.Module) -> None:
    async def use() -> list[int]:
        address = await engine.start_listening_to_data_parallel_coordinator()
        client = InferenceClient(address, deserialize=True)
        client.start()
        answer = await client.add_request(PROMPTS[0], greedy_params(8))
        async with AsyncCoordinatorClient(address) as ours:
            with pytest.raises(UpdateError, match="not served here"):
                await ours.ask("weights_begin")
        await stop(client, engine)
        return list(answer.generated_tokens)

    with compat_engine(tiny_model) as engine:
        first = run(use())
        assert engine.state is EngineState.STOPPED
        assert run(use()) == first
        assert len(first) == 8


def test_a_late_confirmation_is_of_its_own_signal_alone() -> None:
    """The epoch was set on all engines; that does not mean that all have paused since."""
    states = CoordinatedStates()
    states.begin(Signal.PAUSE)
    for other in (Signal.SET_GENERATION_EPOCH, Signal.START_CUDA_PROFILER, Signal.UNPAUSE):
        states.confirm(other)
        assert states.state is EngineState.PAUSING
    states.confirm(Signal.PAUSE)
    states.confirm(Signal.PAUSE)  # a second client's: all stands still already
    assert states.state is EngineState.PAUSED


def test_what_is_refused(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        start = engine.start_listening_to_data_parallel_coordinator
        for arguments, message in (
            ({"coordinator_schedule_output_path": "x"}, "coordinator_schedule_output_path"),
            ({"launch_inference_coordinator": False}, "inference_coordinator_port"),
            ({"hostname": "no.such.host.invalid"}, "no.such.host.invalid"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                run(start(**arguments))
        with pytest.raises(ConfigurationError, match="start_listening"):
            run(engine.run_engine_with_coordinator())
    with pytest.raises(RuntimeError, match="start"):
        InferenceClient("tcp://127.0.0.1:1").pause_engines()


def test_who_waits_goes_on_though_the_next_signal_is_there() -> None:
    async def use() -> None:
        states = CoordinatedStates()
        states.begin(Signal.PAUSE)
        states.confirm(Signal.PAUSE)
        states.begin(Signal.UNPAUSE)
        waiting = asyncio.ensure_future(states.wait_until(EngineState.RUNNING))
        await asyncio.sleep(0)
        states.confirm(Signal.UNPAUSE)
        states.begin(Signal.PAUSE)  # in the same turn of the event loop
        assert states.state is EngineState.PAUSING
        await waiting
        with pytest.raises(ValueError, match="RESUME is ignored"):
            states.begin(Signal.RESUME)

    run(use())


def follow(states: CoordinatedStates, *signals: Signal) -> None:
    """Signals that all engines follow, one after the other."""
    for signal in signals:
        states.begin(signal)
        states.confirm(signal)


def test_a_late_rank_finds_states_that_have_passed() -> None:
    """A rank that makes the calls of the first one, and is slow between them."""

    async def use() -> None:
        states = CoordinatedStates()
        follow(states, Signal.PAUSE)
        await states.wait_in_turn(EngineState.PAUSED)
        follow(states, Signal.UNPAUSE, Signal.PAUSE, Signal.SUSPEND, Signal.RESUME, Signal.STOP)
        for state in ("RUNNING", "PAUSED", "SUSPENDED", "RESUMED", "STOPPED"):
            await asyncio.wait_for(states.wait_in_turn(EngineState[state]), PATIENCE_S)
        with pytest.raises(EngineStopped, match="will not be SUSPENDED"):
            await states.wait_in_turn(EngineState.SUSPENDED)  # that one has been waited for

    run(use())


def test_a_rank_in_time_waits_for_what_comes() -> None:
    async def use() -> None:
        states = CoordinatedStates()
        follow(states, Signal.PAUSE, Signal.UNPAUSE)
        for state in (EngineState.PAUSED, EngineState.RUNNING):
            await states.wait_in_turn(state)
        again = asyncio.ensure_future(states.wait_in_turn(EngineState.PAUSED))
        await asyncio.sleep(0)
        states.begin(Signal.PAUSE)
        await asyncio.sleep(0)
        assert not again.done()
        states.confirm(Signal.PAUSE)
        await asyncio.wait_for(again, PATIENCE_S)

    run(use())


def test_nobody_waits_for_a_state_of_a_stopped_engine() -> None:
    async def use() -> None:
        states = CoordinatedStates()
        waiting = [
            asyncio.ensure_future(states.wait_until(EngineState[state]))
            for state in ("SUSPENDED", "PAUSED", "SUSPENDED")
        ]
        await asyncio.sleep(0)
        waiting[2].cancel()
        follow(states, Signal.PAUSE, Signal.STOP)
        with pytest.raises(EngineStopped, match="will not be SUSPENDED"):
            await waiting[0]
        await waiting[1]
        with pytest.raises(EngineStopped, match="will not be RUNNING"):
            await states.wait_until(EngineState.RUNNING)
        await states.wait_until(EngineState.STOPPED)

    run(use())


def test_a_trace_goes_with_a_request_to_the_engine(tiny_model, caplog):
    caplog.set_level("INFO", "megatron_async")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    async def use() -> None:
        address = await engine.start_listening_to_data_parallel_coordinator()
        client = InferenceClient(address)
        client.start()
        await client.add_request(
            PROMPTS[0], greedy_params(4), traceparent=f"00-{trace}-00f067aa0ba902b7-01"
        )
        with pytest.raises(RequestError, match="traceparent='x'"):
            client.add_request(PROMPTS[0], greedy_params(4), traceparent="x")
        await stop(client, engine)

    with compat_engine(tiny_model) as engine:
        run(use())
    assert f"(trace {trace}) ended (length): 4 tokens" in caplog.text
