"""`WeightUpdate`: new weights that a program in this process gives its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from megatron_async.devices import Device, Event
from megatron_async.engine.admission import POLL_S
from megatron_async.engine.step_loop import StepLoop
from megatron_async.engine.turn import EngineThread
from megatron_async.engine.updating import UpdateDone, check_order
from megatron_async.errors import EngineStopped, UpdateError, WrongThread
from megatron_async.interrupts import HeldInterrupts
from megatron_async.requests.weight_versions import Version
from megatron_async.updates.stage import Stage
from megatron_async.updates.weight_round import WeightRound


class _Engine(Protocol):
    """The parts of an engine that finish a round."""

    loop: StepLoop
    thread: EngineThread

    def follow(self) -> bool: ...
    def step_modern(self) -> dict[str, Any]: ...
    def take_back(self, report: dict[str, Any]) -> None: ...


class WeightUpdate:
    """A round of weights, from its beginning to its end. On several ranks each rank makes the same
    calls, as with `LLM.generate`.

    Args:
        engine: begins the round.
        version: of the weights.
        policy: see `Policy`.
        **options: of `WeightRound`.

    Raises:
        UpdateError: an option or the memory for it; the round has failed on all ranks then.
        WrongThread: staging "none" on another thread than the engine's.
    """

    def __init__(self, engine: _Engine, version: Version, policy: Any, **options: Any) -> None:
        self._round = None
        check_order(version, policy)
        self._engine, self.version, self._policy = engine, version, policy
        self._is_whole = not options.get("partial") and options.get("selector", "all") == "all"
        updating = engine.loop.updating
        self._number = updating.begin(self._is_whole)
        with self._failing():
            wrapper = engine.loop.controller.inference_wrapped_model
            self._round = found = WeightRound.of(wrapper, **options)
            if found.plan.staging == "none":
                engine.thread.check()
                updating.write_in_place(self._number, self)
                engine.loop.drain()

    @property
    def info(self) -> dict[str, Any]:
        """What the round takes on this rank, before a byte has moved: fields of `RoundPlan`."""
        return asdict(self._opened.plan)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors, in any order and any number of calls, on any thread (`WeightRound.load`).

        Raises:
            UpdateError: one is not the model's; the round has failed on all ranks.
        """
        with self._failing():
            self._opened.load(tensors)

    def load_folder(self, folder: str) -> None:
        """Take all tensors from a folder; as `load`."""
        with self._failing():
            self._opened.load_folder(folder)

    def finish(self) -> UpdateDone:
        """Commit: the next step that is planned has the new weights. Waits until all ranks have
        called it, and for no step.

        Raises:
            UpdateError: tensors are missing or came twice, here or on another rank. The old weights
                serve on, but with staging "none".
        """
        updating = self._engine.loop.updating
        with self._failing():
            self._opened.finish()
            updating.check_may_begin(self._is_whole, self._number)  # it may not any more
        found, self._round = self._opened, None
        updating.stage(self._number, found)
        done = settle(self._engine, self._number, self.version, self._policy)
        if found.plan.staging == "direct":  # the caller may change its tensors now
            self._engine.loop.context.device.caller_waits()
        return done

    def drop(self) -> None:
        """End the round on all ranks; the old weights serve on, but with staging "none" none do
        until a whole round has come. A round that has ended stays as it is."""
        if self._round is not None:
            self._fail(f"weights {self.version!r} were dropped before they were whole.")

    @property
    def _opened(self) -> WeightRound:
        if self._round is None:
            raise UpdateError(f"the round of weights {self.version!r} has ended: begin another.")
        return self._round

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(f"{error}" if isinstance(error, UpdateError) else repr(error))
            raise

    def _fail(self, why: str) -> None:
        found, self._round = self._round, None
        has_written = found is None or found.is_torn
        self._engine.loop.updating.fail(self._number, why, has_written)
        if found is not None:
            found.drop()
        with suppress(UpdateError, EngineStopped):
            settle(self._engine, self._number, self.version, self._policy)


def settle(engine: _Engine, number: int, version: Version, policy: Any) -> UpdateDone:
    """Have a round committed that is staged on this rank, or dropped that has failed.

    Raises:
        UpdateError: the round has failed.
    """
    done = engine.loop.updating.commit(number, version, policy)
    try:
        if engine.loop.group.follows:
            engine.follow()
            if not done.done():
                raise UpdateError(f"the leader has ended before round {number} did.")
            return done.result(0)
        try:
            _drive(engine, done)
        finally:
            with HeldInterrupts():  # followers wait for it
                engine.loop.group.release()
        return done.result(0)
    finally:
        del done  # its error has this frame, and by it the callers' tensors


def _drive(engine: _Engine, done: Future[UpdateDone]) -> None:
    loop = engine.loop
    while not done.done():
        try:
            with engine.thread.works(is_brief=True), loop.giving_up():
                loop.tend_updates()
            if not done.done():
                engine.take_back(engine.step_modern())
        except WrongThread:  # which commits it, while it is at work
            wait([done], POLL_S)


class WrittenInPlace(Stage):
    """Weights that somebody else has written in place, up to `written`: what follows from them is
    made again."""

    def __init__(self, device: Device, refresh: Callable[[], bool]) -> None:
        self._device, self._refresh = device, refresh
        self.written: Event | None = None

    def commit(self) -> bool:
        if self.written is not None:
            self._device.compute.wait(self.written)
        return self._refresh()

    def drop(self) -> None:
        """Nothing is kept."""


@contextmanager
def weights_open(engine: _Engine, version: Version, policy: Any = "keep") -> Iterator[None]:
    """`DynamicInferenceEngine.weights_open`."""
    engine.thread.check()
    updating, device = engine.loop.updating, engine.loop.context.device
    engine.loop.turn.make_whole()
    check_order(version, policy)
    derived = engine.loop.controller.inference_wrapped_model.derived
    derived.check_open()
    refresh = derived.refresh
    stage, number = WrittenInPlace(device, refresh), updating.begin(is_whole=True)
    try:
        updating.write_in_place(number, stage)
        device.caller_waits()  # steps in flight read them
        yield
        stage.written = device.caller_event()
        updating.stage(number, stage)
    except BaseException as error:
        updating.fail(number, f"weights_open of version {version!r} broke off: {error!r}")
        with suppress(UpdateError):
            settle(engine, number, version, policy)
        raise
    settle(engine, number, version, policy)
