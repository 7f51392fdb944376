"""A stream that breaks outside of any step: all that wait are told, by `step_modern` as by
`async_step`, and on a device that must be asked as on one that tells."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import CpuDevice
from megatron_async.devices.base import Event
from megatron_async.devices.cpu import CpuEvent
from megatron_async.engine import arrival
from tests.support.harness import greedy, make_engine, random_prompts

PATIENCE_S = 30.0
"""Time for a test: far more than anything here takes."""
SLOW_S = 0.05


class AskedEvent(CpuEvent):
    """The event cannot tell, and asking it raises, as a broken GPU stream's event does."""

    questions = 0
    """Since its last recording."""

    def arm(self, worker: Any) -> Any:
        self.questions = 0
        return super().arm(worker)

    def query(self) -> bool:
        self.questions += 1
        if super().query():
            self.wait()
        return super().query()

    def tell(self, call: Callable[[], None]) -> bool:
        return False


class AskedCpu(CpuDevice):
    """A CPU with a GPU's events."""

    def event(self, timing: bool = False) -> Event:
        return AskedEvent()


def broken_engine(
    tiny_model: torch.nn.Module, device: CpuDevice, lookahead: int, is_late: bool
) -> DynamicInferenceEngine:
    """An engine whose compute stream breaks behind a few steps; late: some time after a launch."""
    engine = make_engine(tiny_model, device=device, lookahead=lookahead)
    for number, prompt in enumerate(random_prompts(0, (5, 9))):
        engine.add_request(number, prompt, greedy(30))
    for _ in range(4):
        engine.step_modern()

    def fault() -> None:
        time.sleep(SLOW_S * is_late)
        raise ZeroDivisionError("a fault of the stream")

    device.compute.launch(fault)
    return engine


def errors(call: Callable[[], Any], times: int) -> list[str]:
    """What calls raise, and for what, from the first one on that does: steps launched before the
    fault are booked before."""
    found: list[str] = []
    for _ in range(times):
        try:
            call()
        except Exception as error:
            found.append(f"{error!r} for {first_cause(error)!r}")
        else:
            assert not found, "a call went well after one that failed"
    return found


def first_cause(error: BaseException) -> BaseException:
    """What went wrong first."""
    return error if error.__cause__ is None else first_cause(error.__cause__)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("device", [CpuDevice, AskedCpu])
def test_async_step_raises_what_step_modern_does(
    tiny_model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    lookahead: int,
    device: type[CpuDevice],
    is_late: bool,
) -> None:
    """Every call raises; none hangs, and none asks a broken event over and over."""
    monkeypatch.setattr(arrival, "ASK_FOR_S", 1.0)
    serial = broken_engine(tiny_model, device(), lookahead, is_late)
    expected = errors(serial.step_modern, lookahead + 4)
    engine = broken_engine(tiny_model, device(), lookahead, is_late)

    def step() -> None:
        asyncio.run(asyncio.wait_for(engine.async_step(), PATIENCE_S))

    found = errors(step, lookahead + 4)
    assert found == expected
    assert len(found) >= 4
    assert all("ZeroDivisionError('a fault of the stream')" in error for error in found)
    ready = engine.in_flight[0].ready
    if isinstance(ready, AskedEvent):
        before = ready.questions
        assert errors(step, 1) == found[:1]
        assert ready.questions == before + 1
    for each in (serial, engine):
        each.close()


@pytest.mark.parametrize("device", [CpuDevice, AskedCpu])
def test_run_engine_ends_with_it(tiny_model: torch.nn.Module, device: type[CpuDevice]) -> None:
    engine = broken_engine(tiny_model, device(), 1, False)

    async def run() -> None:
        await asyncio.wait_for(engine.run_engine(), PATIENCE_S)

    with pytest.raises(RuntimeError, match="work on the CPU stream failed"):
        asyncio.run(run())
    engine.close()
