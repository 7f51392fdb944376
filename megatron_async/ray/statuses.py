"""Which replicas of an application there are, as this process' router of it was told.

Here and not beside the router: Ray copies the router's module, globals and all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Statuses = Mapping[str, Mapping[str, Any]]
"""By name what each replica has told of itself (`FleetReplica.status`); {}: nothing yet."""

_seen: dict[str, Statuses] = {}


def see(application: str, replicas: Statuses) -> None:
    """Take in the replicas that an application has now; any thread may."""
    _seen[application] = replicas


def replicas_of(application: str) -> Statuses:
    """The replicas that an application has now; none before there is a router."""
    return _seen.get(application, {})
