"""`Job`: all ranks that torchrun started together, as each of them knows them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import zmq

from megatron_async.communication.death_watch import DeathWatch
from megatron_async.communication.exchange import Failure, StoreExchange
from megatron_async.communication.host import (
    INTERFACE_VARIABLE,
    interface_of,
    is_loopback,
    loopback_interface,
    own_address,
)
from megatron_async.communication.record import RankRecord
from megatron_async.communication.waiting import Wait

logger = logging.getLogger("megatron_async")

EXCHANGE_TIMEOUT_S = 120.0
"""Seconds that a rank may be late for an exchange."""
FINISH_TIMEOUT_S = 24 * 3600.0
"""Seconds that a replica may need longer than others; a rank that dies is noticed at once."""


class Job:
    """The ranks of a job. `bootstrap.join_job` makes it; there is one in a process.

    Args:
        records: of all ranks, by rank.
        rank: this process.
        store: which all ranks share; used at the start, not in steps.
        exchange: all-gathers through it; None in a world of one.
        watch: of all ranks.

    Attributes:
        rank: of this process, in the whole job.
        world_size: number of ranks.
        local_rank: of the ranks of this host.
        records: of all ranks, by rank: hosts, process ids.
        store: see above.
        watch: see `DeathWatch`.
    """

    def __init__(
        self,
        records: Sequence[RankRecord],
        rank: int,
        store: dist.Store,
        exchange: StoreExchange | None,
        watch: DeathWatch,
    ) -> None:
        self.records = tuple(records)
        self.rank = rank
        self.world_size = len(records)
        self.local_rank = records[rank].local_rank
        self.store = store
        self.watch = watch
        self.pid = os.getpid()
        self._exchange = exchange
        self._counts: dict[str, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._closed = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of each rank's host, by rank."""
        return tuple(record.host for record in self.records)

    @property
    def me(self) -> RankRecord:
        """The record of this process."""
        return self.records[self.rank]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """ZMQ context for sockets to other ranks; made at the first use."""
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    def address(self) -> str:
        """The IP address by which ranks of other hosts reach this one.

        The master's own name often stands for a loopback address on its own host (127.0.1.1 in
        /etc/hosts), and the route to it then says nothing: the route to another host does.
        """
        if is_loopback(self.me.address):
            for record in self.records:
                if not record.on_host_of(self.me) and not is_loopback(record.address):
                    return own_address(record.address)
        return self.me.address

    def route_collectives(self) -> None:
        """Tell torch's backends the interface to use, where the user has not; call it before they
        start.

        By themselves gloo takes the address of the host's name, which is a public one on some hosts
        and a loopback address on others, and NCCL any interface but the loopback. They accept
        every peer. So ranks of one host use its loopback interface.

        Raises:
            ConfigurationError: the interface is missing.
        """
        if all(record.on_host_of(self.me) for record in self.records):
            if self.world_size > 1 and not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= {
                *os.environ
            }:
                interface = loopback_interface()
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            return
        interface = interface_of(self.address())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if INTERFACE_VARIABLE in os.environ:  # NCCL chooses well by itself
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if self.rank == 0:
            hosts = sorted(set(self.hosts))
            logger.warning(
                "The ranks of this job are on several hosts (%s) and talk without encryption; "
                "every peer that reaches their ports can join. Use a network that you trust.",
                ", ".join(hosts),
            )

    def exchange(
        self,
        name: str,
        value: str,
        members: Sequence[int] | None = None,
        timeout_s: float | None = EXCHANGE_TIMEOUT_S,
    ) -> dict[int, str]:
        """Exchange a value with the members; all members call this, in the same order.

        Args:
            name: of the value; named in errors.
            value: of this rank.
            members: ranks that take part; None: all.
            timeout_s: seconds that another rank may be late; None: no limit.

        Returns:
            rank -> value, of each member.

        Raises:
            RankLost: a member is gone.
            CommunicationTimeout: a member did not come.
        """
        return self._gather(name, value, members, timeout_s)[1]

    def check_same(
        self, name: str, mapping: Mapping[str, Any], timeout_s: float = EXCHANGE_TIMEOUT_S
    ) -> None:
        """Compare a mapping that must be the same on all ranks; all ranks call this.

        Args:
            name: of the mapping ("config").
            mapping: field -> value; values are compared by their `repr`.
            timeout_s: how late another may be.

        Raises:
            ConfigurationError: names the first field that differs, the ranks and the values.
            RankLost: a rank is gone.
            CommunicationTimeout: a rank did not come.
        """
        mine = json.dumps({field: repr(value) for field, value in mapping.items()})
        key, values = self._gather(f"same {name}", mine, None, timeout_s)
        if self._exchange is not None:
            said = {rank: json.loads(value) for rank, value in values.items()}
            if difference := self._exchange.require_same(f"the {name}", said):
                self._exchange.fail(Failure(difference), key, self.world_size)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back when the job is closed, before the goodbye."""
        self._callbacks.append(callback)

    def close(self, failure: str = "") -> None:
        """Leave the job in order, so that the end of this process does not count as a death.

        Called automatically at the end of the process. May be called twice.

        Args:
            failure: why this rank does not end in order; the others then count it as lost.
        """
        if self._closed or os.getpid() != self.pid:
            return
        self._closed = True
        for callback in self._callbacks:
            callback()
        if self._context is not None:
            self._context.destroy(linger=0)  # first, so that last words come before the goodbye
            self._context = None
        self.watch.close(failure)

    def _gather(
        self, name: str, value: str, members: Sequence[int] | None, timeout_s: float | None
    ) -> tuple[str, dict[int, str]]:
        ranks = list(range(self.world_size)) if members is None else list(members)
        if self._exchange is None or len(ranks) == 1:
            return "", {self.rank: value}
        group = f"{name} of {','.join(map(str, ranks))}"
        self._counts[group] = count = self._counts.get(group, 0) + 1
        key = f"{group}/{count}"
        wait = Wait(f"the exchange of {name!r}", timeout_s, self.watch, ranks)
        return key, self._exchange.gather(key, value, ranks, wait)
