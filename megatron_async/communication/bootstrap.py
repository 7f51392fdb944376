"""How the ranks of a job find each other, before torch.distributed does.

Torch's own start waits for a number of processes, but cannot say which is missing or was started
twice. So the ranks first meet in the same store and exchange their records; then torch uses it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec
import torch
import torch.distributed as dist

from megatron_async.communication.death_watch import DeathWatch
from megatron_async.communication.exchange import Failure, StoreExchange
from megatron_async.communication.host import host_identity, own_address
from megatron_async.communication.job import Job
from megatron_async.communication.record import RankRecord, decode_record, encode_record
from megatron_async.communication.rendezvous import Launch, open_store
from megatron_async.communication.waiting import Wait
from megatron_async.errors import ConfigurationError
from megatron_async.version import __version__

JOIN_TIMEOUT_VARIABLE = "MEGATRON_ASYNC_JOIN_TIMEOUT_S"
"""Environment: seconds that ranks wait for each other at the start (default 120)."""

BEHIND_WATCH_S = 1.0
"""Seconds that the end of a failed process may take beyond the grace period after a loss."""

LOOPBACK = "127.0.0.1"

_job: Job | None = None
_joins = 0


def join_job(timeout_s: float | None = None) -> Job:
    """Meet the other ranks that torchrun started, once in a process; later calls return the same.

    A process without RANK and WORLD_SIZE is a job of one, without any socket. Where
    torch.distributed is initialised already, its store and ranks are taken.

    Args:
        timeout_s: seconds that a rank waits for the others; None: MEGATRON_ASYNC_JOIN_TIMEOUT_S.

    Raises:
        CommunicationTimeout: ranks are missing (named), or the master does not answer.
        ConfigurationError: a rank was started twice, ranks disagree about WORLD_SIZE or run
            different versions, the master's port is in use, or an environment variable is invalid.
        RankLost: a rank died meanwhile.
    """
    global _job, _joins
    if _job is not None and not _job.is_closed and _job.pid == os.getpid():
        return _job
    timeout = _join_timeout_s() if timeout_s is None else timeout_s
    launch = Launch.from_environment()
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store() if world > 1 else dist.HashStore()
    elif launch is not None and launch.world_size > 1:
        rank, world = launch.rank, launch.world_size
        store = open_store(launch, timeout)
    else:
        rank, world, store = 0, 1, dist.HashStore()
    _joins += 1
    if world == 1:
        _job = Job([_record(0, 1, LOOPBACK)], 0, store, None, DeathWatch(0))
        return _job
    own = dist.PrefixStore(f"megatron_async/{_joins}", store)
    exchange = StoreExchange(own, rank, launch is not None and launch.hosts_store)
    watch = DeathWatch(rank)
    try:
        records = _meet(rank, world, exchange, watch, timeout, _address(launch))
    except BaseException:
        watch.close("it could not join the job")
        raise
    watch.start()
    _job = Job(records, rank, store, exchange, watch)
    atexit.register(_leave_at_exit, _job)
    return _job


def _meet(
    rank: int,
    world: int,
    exchange: StoreExchange,
    watch: DeathWatch,
    timeout_s: float,
    address: str,
) -> list[RankRecord]:
    """Exchange records with the other ranks, and link the death watches."""
    me = _record(rank, world, address)
    watch.know([me])
    mine = encode_record(me)
    there = decode_record(exchange.claim("ranks", mine))
    if there != me:
        exchange.fail(
            Failure(
                f"RANK={rank} was started twice: {there} and {me}. Give every process a rank of "
                "its own (torchrun does; check --node-rank on each host), or another MASTER_PORT "
                "if these are two jobs."
            ),
            "ranks",
            world,
        )
    unwatched: dict[int, RankRecord] = {}
    known = {rank: me}

    def link() -> None:
        """On rank 0: connect to the watches of those that have told where they listen."""
        for other, record in list(unwatched.items()):
            if (endpoints := exchange.told("watched", other)) is not None:
                del unwatched[other]
                watch.connect(me, record, msgspec.json.decode(endpoints, type=list[str]))
        watch.step(0.0)
        watch.check_unlinked()

    def look(present: Collection[int]) -> None:
        for other in sorted(set(present) - known.keys()):
            known[other] = record = decode_record(exchange.peek("ranks", other))
            if record.world_size != world:
                exchange.fail(_world_sizes(me, record), "ranks", len(present))
            watch.know([record])
            if rank == 0:
                unwatched[other] = record
            elif other == 0:
                endpoints = watch.bind(address, record.on_host_of(me))
                exchange.tell("watched", msgspec.json.encode(endpoints).decode())
        link()
        if watch.losses:
            lost = watch.losses[0]
            text = f"{watch.describe([lost.rank])} died while the job started: {lost.reason}."
            exchange.fail(Failure(text, [lost.rank]), "ranks", len(present))

    wait = Wait(
        f"all {world} ranks to start",
        timeout_s,
        None,
        remedy="Check that it was started (torchrun on each host, with the same --nnodes and "
        "--nproc-per-node, and its own --node-rank), that it did not fail before (see its "
        "output), and that it reaches MASTER_ADDR:MASTER_PORT.",
    )
    values = exchange.gather("ranks", None, range(world), wait, look)
    records = [decode_record(values[other]) for other in range(world)]
    versions = {record.rank: record.versions for record in records}
    if difference := exchange.require_same("their software", versions):
        exchange.fail(Failure(difference), "ranks", world)
    _await_links(watch, unwatched, link, timeout_s)
    return records


def _await_links(
    watch: DeathWatch, unwatched: Collection[int], link: Callable[[], None], timeout_s: float
) -> None:
    wait = Wait(
        "the death watch's connections",
        timeout_s,
        watch,
        remedy="The hosts must reach each other by TCP on any port: check the firewall, or name "
        "the interface in MEGATRON_ASYNC_INTERFACE.",
    )
    while missing := [*unwatched, *watch.unlinked()]:
        # A rank that has not told yet where it listens wakes nobody.
        watch.step(min(0.01 if unwatched else 0.05, wait.seconds_to_sleep(missing)))
        link()


def _address(launch: Launch | None) -> str:
    """The IP address by which ranks of other hosts, if there are any, reach this one."""
    if launch is None:
        return own_address(os.environ.get("MASTER_ADDR", LOOPBACK))
    return LOOPBACK if launch.folder is not None else own_address(launch.master_address)


def _record(rank: int, world: int, address: str) -> RankRecord:
    return RankRecord(
        rank=rank,
        world_size=world,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        host=socket.gethostname(),
        host_identity=host_identity(),
        pid=os.getpid(),
        address=address,
        versions={"megatron_async": __version__, "torch": str(torch.__version__)},
    )


def _world_sizes(me: RankRecord, other: RankRecord) -> Failure:
    return Failure(
        f"{me} has WORLD_SIZE={me.world_size}, but {other} has WORLD_SIZE={other.world_size}: "
        "ranks of one job need the same. Start it with the same --nnodes and --nproc-per-node on "
        "each host, or another MASTER_PORT if these are two jobs."
    )


def _join_timeout_s() -> float:
    text = os.environ.get(JOIN_TIMEOUT_VARIABLE, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ConfigurationError(f"{JOIN_TIMEOUT_VARIABLE}={text!r} must be seconds above 0.")
    return seconds


def bound_exit(job: Job) -> bool:
    """Where a job has failed, a GPU may wait for another rank for ever: let the end of this
    process, which has begun, take no longer than the grace period after a loss.

    The death watch cannot see to it: none of Python's threads runs beside a call that keeps the
    GIL, nor behind the exit functions.

    Returns:
        whether it may hang; then `faulthandler` prints where and ends the process with 1.
    """
    has_failed = bool(job.watch.losses) or getattr(sys, "last_exc", None) is not None
    grace = job.watch.end_process_after_s
    may_hang = has_failed and job.world_size > 1 and torch.cuda.is_initialized()
    if may_hang and grace is not None:
        # Behind the watch, which says more where it can.
        faulthandler.dump_traceback_later(grace + BEHIND_WATCH_S, exit=True, file=2)
    return may_hang


def _leave_at_exit(job: Job) -> None:
    """Say goodbye at the end of the process; one that ends with an exception says which.

    What Python frees behind the exit functions waits for the GPU (torch's symmetric memory does).
    So a hanging one is waited for here: before the goodbye if a rank was lost, since the watch says
    why it ends the process; else behind it, since the others shall not wait too.
    """
    error, may_hang = getattr(sys, "last_exc", None), bound_exit(job)
    if may_hang and job.watch.losses:
        _wait_for_gpus()
    job.close("" if error is None else f"{type(error).__name__}: {error}")
    if may_hang:
        _wait_for_gpus()
        faulthandler.cancel_dump_traceback_later()


def _wait_for_gpus() -> None:
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):  # else there is nothing of ours, nor a context
            with suppress(RuntimeError):  # of a step that failed, again
                torch.cuda.synchronize(index)  # sync-ok: at exit
