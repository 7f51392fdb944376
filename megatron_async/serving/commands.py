"""Commands of clients to a replica, and which of them a replica can follow."""

from __future__ import annotations

from collections.abc import Collection

from megatron_async.serving.records import ReplicaRecord, ReplicaState

COMMANDS = {
    "pause": ReplicaState.PAUSED,
    "drain": ReplicaState.DRAINING,
    "resume": ReplicaState.READY,
    "remove": ReplicaState.LEAVING,
}


def find_replica(name: str, replicas: Collection[ReplicaRecord]) -> ReplicaRecord:
    """The replica of that name.

    Raises:
        ValueError: there is none.
    """
    for replica in replicas:
        if replica.name == name:
            return replica
    there = ", ".join(sorted(replica.name for replica in replicas)) or "none"
    raise ValueError(f"there is no replica named {name!r}; there are: {there}.")


def state_after(what: str, replica: ReplicaRecord) -> ReplicaState:
    """The state of a replica after a command.

    Raises:
        ValueError: there is no such command, or this replica cannot follow it.
    """
    if what not in COMMANDS:
        raise ValueError(f"{what!r} is no command; there are: stats, {', '.join(COMMANDS)}.")
    if replica.state.is_departing:
        if what == "remove":
            return replica.state
        raise ValueError(
            f"replica {replica.name!r} cannot {what}: it is leaving. Start another one."
        )
    if what == "pause" and replica.info.shares_experts:
        raise ValueError(
            f"replica {replica.name!r} cannot stand still, because others of its job need its "
            "experts: drain it, and it is given no further requests."
        )
    return COMMANDS[what]
