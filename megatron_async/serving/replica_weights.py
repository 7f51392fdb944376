"""`ReplicaWeights`: what one rank of a replica does in updates of the service's weights.

The leader tells its followers in the group's log. Each rank loads in a thread of its own while
steps run, and says to its engine that a round is staged, or why it cannot be: so a follower's fault
fails the round, where the leader waits for all ranks (`Updating.staged`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec.structs import replace

from megatron_async.communication.bootstrap import join_job
from megatron_async.errors import JobFailed, UpdateError
from megatron_async.ranks.follower import Follower
from megatron_async.serving.messages import Weights
from megatron_async.serving.weight_fields import Begin, Group, Load, Piece, read_fields
from megatron_async.serving.weight_sources import (
    FOLDER_VARIABLE,
    TRAINERS_VARIABLE,
    check_trainer,
    folder_below,
)
from megatron_async.updates.checksum import combined, weights_checksum
from megatron_async.updates.transports import (
    DTYPES,
    TrainersGroup,
    open_group,
    open_handles,
    receive,
    tensors_of_bytes,
)
from megatron_async.updates.weight_round import WeightRound
from megatron_async.updates.writes import let_go

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine

LOOK_EVERY_S = 0.05
"""Seconds between two looks for a group that has not met."""
GROUP_LIMIT_S = 300.0
"""Seconds within which a trainer's group must meet, and send what it has announced."""
MOST_BEHIND = 4
"""Messages that a follower may have taken and not loaded."""
Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
NEWS = "weights"
"""What the leader's news of updates are called in the group's log."""


class ReplicaWeights:
    """Loads new weights on this rank; no other code may update the engine's weights.

    Args:
        engine: of this rank.
        rank: of this process in its replica.
    """

    def __init__(self, engine: DynamicInferenceEngine, rank: int = 0) -> None:
        self._engine, self._rank = engine, rank
        self._round: WeightRound | None = None
        self._number = 0
        self._is_staged = self._is_committing = False
        self._pieces = _Pieces()
        self._over = Event()
        """Set when the round is dropped: its thread may wait for the trainer."""
        self._groups: dict[str, Future[TrainersGroup]] = {}
        """Groups of trainers, also those that are not complete yet."""
        self._behind: deque[Future[None]] = deque()
        self._checks = 0
        self._jobs: SimpleQueue[Job | None] | None = None
        self._weights = Weights()

    @property
    def weights(self) -> Weights:
        """Weights that the replica has, as the coordinator is told."""
        return replace(self._weights, is_torn=bool(self._engine.updating.torn))

    def follow(self, what: str, value: Any) -> Future[None] | None:
        """Do on a follower what the leader's news say; returns the work that the leader waits
        for."""
        if what != NEWS:
            return None
        if value[0] == "weights_group":
            self._meet(value[1])  # the leader does not wait: a load does
            return None
        work = self._submit(self._try, *value)
        self._behind.append(work)
        if len(self._behind) > MOST_BEHIND:  # or messages would fill the memory
            self._behind.popleft().result()
        return work if _is_waited_for(*value) else None

    async def do(
        self, what: str, fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[str, str] | None]:
        """Do on the leader what the coordinator says.

        Returns:
            the answer, and the reason why it failed, or None.

        Raises:
            JobFailed: ranks of this replica are lost.
        """
        try:
            return await self._lead(what, fields), None
        except JobFailed:
            raise
        except Exception as error:  # whatever it is, it is this round's alone
            return {}, (type(error).__name__, str(error))

    def forget(self) -> None:
        """Drop the open round: the coordinator is lost. What was told to commit does so, or fails
        on those that share experts together."""
        if self._round is not None and not self._is_committing:
            self._engine.group.tell(NEWS, ["weights_drop", {}])
            self._submit(self._try, "weights_drop", {})

    async def _lead(self, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        updating = self._engine.updating
        if what == "weights_label":
            updating.label(fields["version"])
            self._weights = replace(self._weights, version=fields["version"])
            return {}
        if what == "weights_commit":
            return await self._commit(fields)
        if what == "weights_load" and self._writes_in_place and not updating.writing:
            updating.write_in_place(self._number, self)
            self._engine.loop.drain()
        if what != "weights_begin":  # which may be refused here
            self._engine.group.tell(NEWS, [what, fields])
        if what == "weights_group":
            await self._met(self._meet(fields), fields)
            return {}
        answer = await asyncio.wrap_future(self._submit(self._work, what, fields))
        if _is_waited_for(what, fields):
            await self._engine.group.until_told()
        if what == "weights_begin":
            self._engine.group.tell(NEWS, [what, fields])
        elif what == "weights_finish":
            await asyncio.wrap_future(updating.staged(self._number))
        return answer

    async def _met(self, group: Future[Any], fields: Mapping[str, Any]) -> None:
        """Wait for a group. Torch has no limit once a trainer's store has taken the connection."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(group), GROUP_LIMIT_S)
        except TimeoutError:
            name, address = fields["name"], fields.get("address")
            if self._groups.get(name) is group:
                self._groups.pop(name).add_done_callback(_leave)
            raise UpdateError(
                f"process group {name!r} at {address}: cannot be joined (the trainer was silent "
                f"for {GROUP_LIMIT_S:g} s)."
            ) from None

    async def _commit(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        weights = msgspec.convert(fields["weights"], Weights)
        assert self._round is not None, "it is staged"
        order = self._engine.updating.commit(self._number, weights.version, fields["policy"])
        self._is_committing = True
        try:
            done = await asyncio.wrap_future(order)
        finally:
            self._is_committing = False
            self._engine.group.tell(NEWS, ["weights_commit", {}])
            await asyncio.wrap_future(self._submit(self._settle))
        self._weights = replace(weights, begun=self._number)
        await self._engine.group.until_told()
        return done._asdict()

    # ---- In the thread ---------------------------------------------------------------------------

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Work for the thread, which a trainer may hold up; it does not hold up the process's
        end."""
        if arguments[:1] == ("weights_drop",):
            self._over.set()
        if self._jobs is None:
            self._jobs = self._thread()
        future = Future[Any]()
        self._jobs.put((future, work, arguments))
        return future

    def _meet(self, fields: Mapping[str, Any]) -> Future[Any]:
        """Join a trainer's group, or leave it, in a thread of its own: a trainer that stays silent
        holds nothing else up."""
        name, jobs = str(fields.get("name")), self._thread()
        old, future = self._groups.pop(name, None), Future[Any]()
        jobs.put((future, _join, (fields, self._rank, old)))
        jobs.put(None)
        if not fields.get("destroy"):
            self._groups[name] = future
        return future

    def _thread(self) -> SimpleQueue[Job | None]:
        """The queue of a new thread; None ends it."""
        jobs = SimpleQueue[Job | None]()
        Thread(target=self._run, args=(jobs,), name="weights", daemon=True).start()
        return jobs

    def _run(self, jobs: SimpleQueue[Job | None]) -> None:
        device = self._engine.context.device.torch_device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while (job := jobs.get()) is not None:
            future, work, arguments = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments))
                except BaseException as error:
                    future.set_exception(error)

    def _try(self, what: str, fields: Mapping[str, Any]) -> None:
        try:
            self._work(what, fields)
        except Exception as error:  # the leader learns of it, and the round fails
            number = fields.get("number", self._number)
            self._engine.updating.fail(number, f"{type(error).__name__}: {error}")

    def _work(self, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        match what:
            case "weights_begin":
                return self._open(fields)
            case "weights_load":
                self._load(read_fields(fields, Load))
            case "weights_finish":
                self._pieces.check_whole()
                self._opened.finish()
                self._is_staged = True
                self._engine.updating.stage(self._number, self._opened)
            case "weights_commit":  # on a follower, whose engine has done it
                self._settle()
            case "weights_drop":
                return self._drop()
            case "weights_check":
                return self._check()
            case _:
                raise ValueError(f"a replica has no command {what!r}")
        return {}

    def _open(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if self._round is not None:
            raise UpdateError("an update of this replica's weights is open already: drop it.")
        given = dict(fields)
        number = given.pop("number")
        begin = read_fields(given, Begin)
        self._engine.updating.check_may_begin(begin.is_whole)
        self._number, self._pieces, self._is_staged = number, _Pieces(), False
        self._over = Event()
        self._weights = replace(self._weights, begun=number)
        self._round = WeightRound.of(
            self._wrapper, staging=begin.staging, names=begin.names, partial=begin.partial,
            selector=begin.selector, checks_finite=begin.checks_finite,
        )  # fmt: skip
        return asdict(self._round.plan)

    def _load(self, load: Load) -> None:
        round, device = self._opened, self._engine.context.device.torch_device
        round.takes_shards = load.handles is not None  # bytes and broadcasts go to all ranks
        if load.tensors is not None:
            round.check((piece.name, piece.shape) for piece in load.tensors)
            round.load(tensors_of_bytes(self._pieces.whole(load.tensors)))
        elif load.folder is not None:
            round.load_folder(folder_below(os.environ.get(FOLDER_VARIABLE), load.folder))
        elif load.handles is not None:
            handles = load.handles
            shared = open_handles(handles[self._rank if len(handles) > 1 else 0], device)
            round.load(shared)
            if (read := self._engine.context.device.caller_event()) is not None:
                read.wait()  # behind the answer the sender changes them
            let_go(shared)
        elif (sent := load.group) is not None:
            group = self._group(sent.name)
            round.check(zip(sent.names, sent.shapes, strict=True))
            names = sent.names, sent.dtypes, sent.shapes
            round.load(receive(group, *names, device, self._over, sent.packed))

    def _group(self, name: str) -> TrainersGroup:
        """The group of that name, once it has met."""
        joined, why = self._groups.get(name), ""
        while joined is not None and not joined.done():
            if self._over.wait(LOOK_EVERY_S):
                raise UpdateError(f"process group {name!r} has not met: the round was dropped.")
        if joined is None or (error := joined.exception()) is not None:
            why = "" if joined is None else f" ({error})"
            raise UpdateError(f"no process group {name!r} was joined (weights_group){why}.")
        return joined.result()

    def _settle(self) -> None:
        """A round is committed: its sender may change its tensors when all ranks have done this."""
        if self._round is not None:
            self._round.settle()
        self._round = None

    def _drop(self) -> dict[str, Any]:
        if self._round is None:
            return {"is_torn": bool(self._engine.updating.torn)}
        round, self._round = self._round, None
        # Other ranks may have written where this one could not.
        has_written = round.is_torn or not self._engine.loop.group.is_alone
        self._engine.updating.fail(self._number, "the update was dropped.", has_written)
        if not self._is_staged:  # else the engine has it, and drops it
            round.drop()
        return {"is_torn": bool(self._engine.updating.torn)}

    def _check(self) -> dict[str, Any]:
        """One sum for all ranks that hold a part of the weights: those that steps need."""
        self._checks += 1
        self._engine.context.device.caller_waits()  # a commit may be under way
        job, ours = join_job(), weights_checksum(self._wrapper.model)
        theirs = {0: json.dumps(ours)}
        if job.world_size > 1:
            name = f"sums of the weights, {self._checks}"
            needed = job.watch.needed  # None: all ranks of the job
            theirs = job.exchange(name, theirs[0], None if needed is None else sorted(needed))
        told = combined([json.loads(each) for each in theirs.values()])
        return {"checksum": told, "stale_copies": self._wrapper.derived.stale()}

    @property
    def _wrapper(self) -> Any:
        return self._engine.controller.inference_wrapped_model

    @property
    def _opened(self) -> WeightRound:
        if self._round is None:
            raise UpdateError("no update of this replica's weights is open: begin one.")
        return self._round

    @property
    def _writes_in_place(self) -> bool:
        return self._round is not None and self._round.plan.staging == "none"


def _is_waited_for(what: str, fields: Mapping[str, Any]) -> bool:
    """Whether a sender's own tensors are read, so that it may change them when all ranks have done
    this."""
    return what == "weights_commit" or fields.get("handles") is not None


def _join(
    fields: Mapping[str, Any], rank: int, old: Future[TrainersGroup] | None
) -> TrainersGroup | None:
    """Join a trainer's group in place of an `old` one, or only leave that. One that has not met is
    left when it meets or fails."""
    if old is not None:
        old.add_done_callback(_leave)
    group = read_fields(fields, Group)
    if group.destroy:
        return None
    host, _, port = group.address.rpartition(":")
    host = host.strip("[]")
    number = int(port) if port.isdecimal() else 0
    check_trainer(host, number, os.environ.get(TRAINERS_VARIABLE, "").split(","))
    rank += group.rank_offset
    size = group.world_size
    return open_group(group.name, group.backend, host, number, rank, size, GROUP_LIMIT_S)


def _leave(group: Future[TrainersGroup]) -> None:
    if not group.cancelled() and group.exception() is None:
        group.result().close()


class _Pieces:
    """A tensor of which some bytes have come."""

    def __init__(self) -> None:
        self._of: tuple[str, str, list[int]] | None = None
        self._bytes = bytearray()

    def whole(self, pieces: list[Piece]) -> Iterator[tuple[str, str, list[int], bytes | bytearray]]:
        """The tensors that are complete with these pieces.

        Raises:
            UpdateError: a piece does not follow the one before it, or is too long.
        """
        for piece in pieces:
            if piece.dtype not in DTYPES:
                raise UpdateError(
                    f"{piece.name} is of type {piece.dtype}: send {', '.join(DTYPES)}."
                )
            size = math.prod(piece.shape) * DTYPES[piece.dtype].itemsize
            of, end = (piece.name, piece.dtype, piece.shape), piece.offset + len(piece.data)
            follows = self._of in (None, of) and piece.offset == len(self._bytes)
            if not follows or end > size or not (piece.data or size == 0):
                last = self._of[0] if self._of else "no tensor"
                raise UpdateError(
                    f"bytes {piece.offset} to {end} of {piece.name} came after {len(self._bytes)} "
                    f"of {last}: send its {size} bytes in order, and no other tensor between them."
                )
            if len(piece.data) == size:
                yield *of, piece.data
                continue
            self._of = of
            self._bytes += piece.data
            if len(self._bytes) == size:
                data, self._of, self._bytes = self._bytes, None, bytearray()
                yield *of, data

    def check_whole(self) -> None:
        """Raise UpdateError if bytes of a tensor are missing."""
        if self._of is not None:
            raise UpdateError(
                f"of {self._of[0]} only {len(self._bytes)} bytes came: send the rest."
            )


def follow_weights(engine: DynamicInferenceEngine) -> None:
    """On a follower: take part in the updates that its leader is told of."""
    group = engine.loop.group
    assert isinstance(group, Follower), "its leader talks to the service"
    rank = group.members.index(join_job().rank)
    group.on_told = ReplicaWeights(engine, rank).follow
