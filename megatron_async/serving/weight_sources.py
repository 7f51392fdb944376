"""What new weights may come from: folders below one of the administrator's, and trainers at
addresses that the administrator has named. Nothing that a request says is a path or an address by
itself."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from megatron_async.checkpoints.files import is_inside

FOLDER_VARIABLE = "MEGATRON_ASYNC_WEIGHTS_DIR"
"""Environment of a replica: the folder of `--weights-dir`; without it folders are refused."""
TRAINERS_VARIABLE = "MEGATRON_ASYNC_TRAINERS"
"""Environment of a replica: what `--trainer` gave, with commas between; without it process groups
are refused."""


def name_below(root: str | None, given: str) -> str:
    """The name of a folder below `root`, given as such a name or with `root` before it.

    Raises:
        ValueError: there is no root, or it lies elsewhere.
    """
    if root is None:
        raise ValueError("folders of weights are not read: start the service with --weights-dir.")
    name = os.path.relpath(given, root) if os.path.isabs(given) and ".." not in given else given
    if not is_inside(name):
        raise ValueError(
            f"the folder {given[:200]!r} does not lie below --weights-dir: give its name there."
        )
    return name


def folder_below(root: str | None, given: str) -> Path:
    """The folder of `name_below`, where no link, nor any in it, leads out of `root`.

    Raises:
        ValueError: as `name_below`; there is none, or it lies elsewhere.
    """
    name = name_below(root, given)
    assert root is not None
    top = Path(root).resolve()
    found = top / name
    for path in (found, *found.rglob("*")):
        # By `os`: `resolve` raises for a link to itself, which is no file and opens nothing.
        if not Path(os.path.realpath(path)).is_relative_to(top):
            raise ValueError(
                f"{str(path.relative_to(top))[:200]!r} is a link that leads out of --weights-dir."
            )
    if not found.is_dir():
        raise ValueError(f"there is no folder {given[:200]!r} below --weights-dir.")
    return found.resolve()


def check_trainer(host: str, port: int, allowed: Collection[str]) -> None:
    """Raise ValueError if nobody named this address: `allowed` has hosts, or hosts with ports, and
    a host is compared as it is written."""
    if not 0 < port < 65536:
        raise ValueError(f"port {port} is no port of an address: 1 to 65535.")
    if host not in allowed and f"{host}:{port}" not in allowed:
        raise ValueError(
            f"the trainer at {host[:200]}:{port} is not one that this service may meet: start it "
            "with --trainer HOST, or HOST:PORT."
        )
