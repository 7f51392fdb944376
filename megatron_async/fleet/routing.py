"""`FleetRouting`: which replica of a fleet serves a request, by the coordinator's own policy.

The manager of the fleet asks; it knows who is there and who has room. Several ingresses route side
by side: each knows what it gave away itself, and of the others what replicas tell now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.fleet.messages import RouteHint
from megatron_async.serving.routing import Candidate, PrefixTable, RoutingPolicy


class _Known:
    """What is known of one replica."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.prefix = PrefixTable(1)
        self.given: dict[int, RouteHint] = {}
        self.of_others = 0
        """Tokens that requests of other ingresses may need."""

    def heard(self, status: Mapping[str, Any]) -> None:
        if not self.status and status:
            self.prefix = PrefixTable(int(status["kv_blocks"]))
        if status != self.status:
            # What this process gave away it knows better: a status is up to a second old.
            mine = sum(hint.tokens for hint in self.given.values())
            self.of_others = max(int(status.get("unfinished_tokens", 0)) - mine, 0)
        self.status = dict(status)

    def candidate(self, name: str) -> Candidate:
        mine = sum(hint.tokens for hint in self.given.values())
        blocks = sum(hint.blocks for hint in self.given.values())
        total = int(self.status.get("kv_blocks", 0))
        return Candidate(name, mine + self.of_others, total - blocks, len(self.given), self.prefix)


class FleetRouting:
    """Chooses replicas by shared prefix and load; any thread may ask.

    Args:
        policy: who serves a request.
    """

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self._policy = policy or RoutingPolicy()
        self._known: dict[str, _Known] = {}
        self._owners: dict[int, str] = {}
        self._lock = threading.Lock()

    def use(self, policy: RoutingPolicy) -> None:
        """Choose by another policy from now on."""
        self._policy = policy

    def see(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in the replicas that exist now, with the status of each (`FleetReplica.status`; {}:
        none yet)."""
        with self._lock:
            self._known = {name: self._known.get(name, _Known()) for name in replicas}
            for name, status in replicas.items():
                self._known[name].heard(status)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What each replica has told; {} of one that has told nothing yet."""
        with self._lock:
            return {name: known.status for name, known in self._known.items()}

    def order(self, names: Sequence[str], hint: RouteHint) -> list[str]:
        """Replicas for a request, the best one first.

        Args:
            names: of those that are there.
            hint: of the request.
        """
        if hint.replica:
            return [hint.replica] if hint.replica in names else []
        with self._lock:
            left = {name: self._known.setdefault(name, _Known()) for name in names}
            ordered = []
            while left:
                candidates = [known.candidate(name) for name, known in left.items()]
                best, _ = self._policy.choose(candidates, hint.hashes, hint.blocks)
                ordered.append(best.name)
                del left[best.name]
        return ordered

    def given(self, name: str, hint: RouteHint) -> None:
        """A replica has got a request, or is chosen for one.

        A request counts from the moment a replica is chosen for it: many requests that come at once
        would all be sent to the same replica otherwise. A replica that was chosen before for the
        same request has it no longer.
        """
        with self._lock:
            self._drop(hint.number)
            self._owners[hint.number] = name
            known = self._known.setdefault(name, _Known())
            known.given[hint.number] = hint
            known.prefix.add(hint.hashes)

    def ended(self, number: int, name: str | None = None) -> None:
        """A replica has a request no longer.

        Args:
            number: of the request.
            name: of the replica: nothing happens if another has the request by now. None: whoever
                has it.
        """
        with self._lock:
            if name is None or self._owners.get(number) == name:
                self._drop(number)

    def _drop(self, number: int) -> None:
        owner = self._owners.pop(number, None)
        if owner in self._known:
            self._known[owner].given.pop(number, None)


_routings: dict[str, FleetRouting] = {}


def routing_of(application: str) -> FleetRouting:
    """What this process' router of an application knows; an empty one before there is a router.

    Here and not beside the router: Ray copies the router's module, globals and all.

    Args:
        application: its name.
    """
    return _routings.setdefault(application, FleetRouting())
