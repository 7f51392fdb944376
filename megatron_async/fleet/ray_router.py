"""`PrefixRouter`: Ray Serve's router of a fleet, with the coordinator's policy.

Ray has a router class for shared prefixes, `PrefixCacheAffinityRouter`. Its module needs the extra
ray[llm] (in 2.60.0 already at its import: pyarrow), and it reads prompts as text from vLLM's
request types. So the class here derives from Ray's `RequestRouter`, and `FleetRouting` decides.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from megatron_async.fleet.messages import RouteHint
from megatron_async.fleet.routing import routing_of
from megatron_async.serving.routing import make_policy


class PrefixRouter(RequestRouter):
    """Routes a fleet's calls. The last argument of each is a `RouteHint`."""

    def initialize_state(self, policy: str = "prefix", **_: Any) -> None:
        """Begin.

        Args:
            policy: by a name of `routing.POLICIES`.
        """
        self._routing = routing_of(self.app_name)
        self._routing.use(make_policy(policy))
        self._numbers: dict[str, int] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in the replicas that Ray's controller knows now."""
        super().update_replicas(replicas)
        self._see()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is gone, before Ray's controller says so."""
        super().on_replica_actor_died(replica_id)
        self._see()

    def _see(self) -> None:
        replicas = self.curr_replicas.values()
        self._routing.see({r.replica_id.unique_id: r.routing_stats or {} for r in replicas})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas for a call, best one first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        hint = RouteHint() if pending_request is None else _hint_of(pending_request)
        order = self._routing.order(list(by_name), hint)
        if order and _counts(hint):
            self._routing.given(order[0], hint)
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has taken a call."""
        hint = _hint_of(pending_request)
        if _counts(hint):
            self._numbers[pending_request.metadata.internal_request_id] = hint.number
            self._routing.given(replica_id.unique_id, hint)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A call has ended, however."""
        number = self._numbers.pop(internal_request_id, None)
        if number is not None:
            self._routing.ended(number, replica_id.unique_id)


def _counts(hint: RouteHint) -> bool:
    """Whether a call is a request, which loads a replica."""
    return hint.number >= 0 and not hint.replica


def _hint_of(pending: PendingRequest) -> RouteHint:
    given = pending.args[-1] if pending.args else None
    return given if isinstance(given, RouteHint) else RouteHint()
