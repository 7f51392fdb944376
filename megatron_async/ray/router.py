"""`NamedRouter`: Ray Serve's router of a fleet, which follows an ingress' choice.

The last argument of each call names the replica that it is for; "": any.

Ray has a router class for shared prefixes, `PrefixCacheAffinityRouter`. Its module needs the extra
ray[llm] (in 2.60.0 already at its import: pyarrow), and it reads prompts as text from vLLM's
request types. So the class here derives from Ray's `RequestRouter`, and a `Dispatcher` decides.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from megatron_async.ray.statuses import see


class NamedRouter(RequestRouter):
    """Routes a fleet's calls to the replicas that they name."""

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
        see(self.app_name, {r.replica_id.unique_id: r.routing_stats or {} for r in replicas})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica of a call; none while it is not there."""
        args = () if pending_request is None else pending_request.args
        name = args[-1] if args and isinstance(args[-1], str) else ""
        return [[r for r in candidate_replicas if name in ("", r.replica_id.unique_id)]]
