"""The store in which the ranks of a job first meet: torch's, at torchrun's address."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_async.communication.own_folder import FOLDER_VARIABLE, is_private
from megatron_async.communication.waiting import Wait
from megatron_async.errors import CommunicationTimeout, ConfigurationError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """This process's place in the job, as torchrun's environment variables give it.

    Attributes:
        rank, world_size, local_rank: see torchrun.
        master_address, master_port: where the store is, unless `folder` has it.
        folder: where the ranks meet, if all are on this host and were started so; else None.

    Raises:
        ConfigurationError: a variable is missing, no integer, or out of range.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    folder: Path | None = None

    @classmethod
    def from_environment(cls) -> Launch | None:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and the folder of a job
        of one host; None where neither of the first two is set: a process alone."""
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return None
        if missing := [name for name in VARIABLES if name not in os.environ]:
            raise ConfigurationError(
                f"{' and '.join(missing)} is not set, though RANK or WORLD_SIZE is: start the job "
                "with torchrun, which sets all of them, or unset both to run alone."
            )
        rank, world_size, port = (_integer(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigurationError(
                f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0."
            )
        if not 0 < port < 2**16:
            raise ConfigurationError(f"MASTER_PORT={port} is no port (1 to 65535).")
        if folder := os.environ.get(FOLDER_VARIABLE):
            if not is_private(Path(folder)):
                raise ConfigurationError(
                    f"{FOLDER_VARIABLE}={folder!r} is no folder of this user alone (mode 700): "
                    "unset it, and start ranks by torchrun or scripts/launch_node.sh."
                )
            return cls(rank, world_size, local_rank, "127.0.0.1", port, Path(folder))
        address = os.environ["MASTER_ADDR"]
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size) and not _of_agent():
            address = "127.0.0.1"  # all are here: nobody else has to reach the store
        return cls(rank, world_size, local_rank, address, port)

    @property
    def hosts_store(self) -> bool:
        """Whether this process, rather than torchrun, another rank or a file, keeps the store."""
        return self.rank == 0 and self.folder is None and not _of_agent()


def open_store(launch: Launch, timeout_s: float) -> dist.Store:
    """Connect to the job's store, or open it on rank 0.

    Ranks of one host that were given a folder have the store in a file there. Otherwise it is
    torch's TCPStore, which has no authentication: it listens at MASTER_ADDR alone where that is
    an IP address or "localhost", and at all addresses where it is a name, because that may stand
    for another address on this host than on others.

    If torchrun keeps a store (TORCHELASTIC_USE_AGENT_STORE), that store is used. It outlives ranks
    that torchrun restarts (--max-restarts), so each attempt has keys of its own. Unlike torch's own
    rendezvous, this function does not wait for the other ranks, so a later wait can name the
    missing ones.

    Raises:
        ConfigurationError: the port is in use.
        CommunicationTimeout: the master does not answer.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if launch.folder is not None:
        return dist.PrefixStore(f"attempt_{attempt}", dist.FileStore(str(launch.folder / "store")))
    if not launch.hosts_store:
        _knock(launch, timeout_s)
    try:
        listener = _listener(launch) if launch.hosts_store else None
        store = dist.TCPStore(
            launch.master_address,
            launch.master_port,
            launch.world_size,
            is_master=launch.hosts_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            # Torch closes it with the store.
            master_listen_fd=None if listener is None else listener.detach(),
        )
        return dist.PrefixStore(f"attempt_{attempt}", store)
    except (dist.DistError, RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise ConfigurationError(
                f"Port {launch.master_port} of this host is in use by another process (another "
                "job, or a second process with RANK=0), so rank 0 cannot open the job's store "
                "there: set MASTER_PORT (torchrun --master-port) to a free port."
            ) from error
        raise _no_store(launch, timeout_s, error) from error


def _listener(launch: Launch) -> socket.socket | None:
    """A socket for the store at the master's address alone; None where that cannot be."""
    try:
        name = launch.master_address
        if name == "localhost":
            name = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        family = socket.AF_INET6 if ipaddress.ip_address(name).version == 6 else socket.AF_INET
    except (OSError, ValueError):  # a name
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((name, launch.master_port))
        listener.listen(1024)
    except OSError:  # in use, which torch will find too; or a gateway's address
        listener.close()
        return None
    return listener


def _knock(launch: Launch, timeout_s: float) -> None:
    """Wait until the master's port accepts connections. Torch waits too, but for twice its time
    limit, and prints a page about each attempt."""
    where = (launch.master_address, launch.master_port)
    wait = Wait(f"rank 0 to open {where[0]}:{where[1]}", timeout_s, None)
    while True:
        try:
            socket.create_connection(where, timeout_s).close()
            return
        except OSError as error:
            try:
                time.sleep(min(0.1, wait.seconds_to_sleep([0])))
            except CommunicationTimeout:
                raise _no_store(launch, timeout_s, error) from error


def _no_store(launch: Launch, timeout_s: float, error: Exception) -> CommunicationTimeout:
    return CommunicationTimeout(
        f"Rank {launch.rank} reached no store at {launch.master_address}:{launch.master_port} "
        f"within {timeout_s:g} s ({_first_line(error)}). Check that rank 0 is running, that "
        "MASTER_ADDR and MASTER_PORT are the same everywhere, and that no firewall is between the "
        "hosts.",
        [0],
    )


def _of_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not an integer.") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
