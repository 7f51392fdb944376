"""Texts that explain why a coordinator refuses a replica or gives a request up."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_async.serving.messages import PROTOCOL, ReplicaInfo
from megatron_async.serving.records import (
    MOST_EARLY_DEATHS,
    CoordinatorConfig,
    ReplicaRecord,
    RoutedRequest,
)

MOST_SHOWN = 300
"""Characters of a peer's text in a log line."""


def one_line(text: str) -> str:
    """A peer's text for the log: on one line, printable, and cut. Else a name or a reason could
    look like lines of this process' own."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:MOST_SHOWN])
    return shown if len(text) <= MOST_SHOWN else f"{shown}..."


def wrong_protocol(protocol: int) -> str:
    """The refusal of a peer with another version of the protocol."""
    return (
        f"it speaks protocol {protocol}, the coordinator {PROTOCOL}: install the same version of "
        "megatron_async on both."
    )


def why_refused(info: ReplicaInfo, replicas: Collection[ReplicaRecord]) -> str:
    """Why a replica cannot join these; "" if it can."""
    if not info.name or not info.name.isprintable():
        return f"its name {one_line(info.name)!r} must have printable characters only."
    for size in ("slots", "kv_blocks", "block_size_tokens"):
        if getattr(info, size) < 1:
            return f"{size}={getattr(info, size)} must be at least 1 to serve anything."
    for other in replicas:
        if other.name == info.name:
            return f"a replica named {info.name!r} is there: give each --name its own."
        wrong = [
            f"{key} is {info.model.get(key)!r} and not {other.info.model.get(key)!r}"
            for key in sorted(info.model.keys() | other.info.model.keys())
            if info.model.get(key) != other.info.model.get(key)
        ]
        if info.card != other.info.card:
            wrong.append("its tokenizer, its chat template or a limit is another")
        if wrong:
            return (
                f"it would give other tokens than replica {other.name!r}: {', '.join(wrong)}. "
                "Start all replicas with the same model and settings."
            )
    return ""


def why_not_again(
    request: RoutedRequest, replica: str, reason: str, config: CoordinatorConfig
) -> str:
    """The error of a request that is not served again."""
    lost = f"replica {replica}, which served the request, is gone: {reason}"
    if request.early_deaths > MOST_EARLY_DEATHS:
        return (
            f"{lost}; it is the replica number {request.early_deaths} that died before the "
            "request's first token, so the request may be what kills them, and is not served "
            "again. The replicas' logs say of what they died."
        )
    tries = f"; {request.attempts} replicas tried" if request.attempts > 1 else ""
    return (
        f"{lost}{tries} (on_replica_death={config.on_replica_death}, "
        f"max_retries={config.max_retries})."
    )


def why_nobody_serves(replicas: Collection[ReplicaRecord], departed: str, waited_s: float) -> str:
    """The error of a request for which there is no replica. `departed` is the last that has gone,
    and why; "" if none has."""
    last = f"The last was {departed}." if departed else "None ever joined."
    if replicas:
        there = (f"{replica.name} ({replica.shown_state})" for replica in replicas)
        last = f"There is only {', '.join(there)}."
    return f"there has been no replica to serve it for {waited_s:.0f} s. {last}"


def service_stats(
    counters: Mapping[str, int],
    requests: Mapping[int, RoutedRequest],
    clients: int,
    replicas: Mapping[bytes, ReplicaRecord],
) -> dict[str, object]:
    """The result of a client's `stats`; docs/serving.md lists its entries."""
    names = ("received", "completed", "failed", "aborted", "retried", "moved", "refused")
    return {
        **{f"{name}_requests": counters[name] for name in names},
        "prefix_blocks": counters["prefix_blocks"],
        "unfinished_requests": len(requests),
        "queued_requests": sum(request.replica is None for request in requests.values()),
        "clients": clients,
        "replicas": {replica.name: replica.as_dict() for replica in replicas.values()},
    }
