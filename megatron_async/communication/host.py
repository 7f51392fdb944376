"""What a rank knows of its host, and how the ranks of other hosts reach it."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_async.errors import ConfigurationError

if TYPE_CHECKING:
    import zmq

INTERFACE_VARIABLE = "MEGATRON_ASYNC_INTERFACE"
"""Environment: name or address of the network interface that other hosts reach this one by."""

ABSTRACT_SOCKETS = sys.platform == "linux"
"""Whether `ipc://@name` exists: no file, and gone with its process however that ends."""


def host_identity() -> str:
    """A name that two processes share if, and only if, they reach each other by sockets without a
    network and see each other's process ids.

    A host name says neither: containers share it, or have two on one machine.
    """
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id",):
        if Path(path).exists():
            parts.append(Path(path).read_text().strip())
    for name in ("net", "pid"):
        if os.path.exists(f"/proc/self/ns/{name}"):
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    return " ".join(parts)


def own_address(target: str) -> str:
    """The IP address of this host on the route to `target`, or of the interface that
    MEGATRON_ASYNC_INTERFACE names.

    Args:
        target: name or address of another host (or of this one).

    Raises:
        ConfigurationError: no such interface, or `target` has no address.
    """
    chosen = os.environ.get(INTERFACE_VARIABLE)
    if chosen:
        return _interface_address(chosen)
    try:
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # chooses a route; sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"This host has no route to {target!r} ({error}): check MASTER_ADDR, or name the "
            f"interface to use in {INTERFACE_VARIABLE}."
        ) from error


def _interface_address(chosen: str) -> str:
    addresses = {
        name: [a.address for a in found if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }
    if addresses.get(chosen):
        return str(addresses[chosen][0])
    if any(chosen in found for found in addresses.values()):
        return chosen
    raise ConfigurationError(
        f"{INTERFACE_VARIABLE}={chosen!r} is no interface or address of this host. It has "
        + ", ".join(f"{name} ({', '.join(found)})" for name, found in addresses.items() if found)
        + "."
    )


def interface_of(address: str) -> str:
    """Name of the interface that has this IP address."""
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in found):
            return str(name)
    raise ConfigurationError(f"No interface of this host has the address {address}.")


def loopback_interface() -> str:
    """Name of the interface that only processes of this host reach, as "lo".

    Raises:
        ConfigurationError: there is none, or it is down.
    """
    for name, found in psutil.net_if_addrs().items():
        for entry in found:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and is_loopback(entry.address):
                return str(name)
    raise ConfigurationError(
        "This host has no loopback address, over which its ranks exchange tensors: `ip link set lo "
        "up`, or name another interface in GLOO_SOCKET_IFNAME."
    )


def is_loopback(address: str) -> bool:
    """True for an address that only its own host reaches."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def bind_addresses(address: str, others_on_this_host: bool, other_hosts: bool) -> list[str]:
    """What a ZMQ socket binds to for the ranks that will connect.

    Args:
        address: of this host, for other hosts.
        others_on_this_host: some of them are here.
        other_hosts: some are not.

    Returns:
        ZMQ addresses; "tcp" ones with port "*", which ZMQ chooses.
    """
    found = []
    if others_on_this_host:
        if ABSTRACT_SOCKETS:
            # Unguessable, so that two jobs never meet.
            found.append(f"ipc://@megatron_async-{secrets.token_hex(16)}")
        elif not other_hosts:
            found.append("tcp://127.0.0.1:*")
    if other_hosts:
        found.append(f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*")
    return found


def admit_own_user(socket: zmq.Socket[Any]) -> None:
    """Let a ZMQ socket accept connections by `ipc:` from processes of this user alone. All users
    see the names of abstract sockets; the kernel says whose process connects. Before `bind`."""
    if ABSTRACT_SOCKETS:
        from zmq import IPC_FILTER_UID  # here: a supervisor needs `is_loopback`, and no zmq

        socket.setsockopt(IPC_FILTER_UID, os.getuid())


def choose_endpoint(endpoints: Sequence[str], same_host: bool) -> str:
    """The endpoint to connect to, of those that a rank is bound to."""
    local = [endpoint for endpoint in endpoints if endpoint.startswith("ipc:")]
    remote = [endpoint for endpoint in endpoints if endpoint.startswith("tcp:")]
    return (local + remote)[0] if same_host else remote[0]


def process_state(pid: int) -> str:
    """What became of a process of this host: "running", "stopped" or "ended"."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "ended"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "ended"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "running"


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text, such as "rank 3" or "ranks 1, 2 and 5"."""
    found = [str(rank) for rank in ranks]
    if len(found) == 1:
        return f"rank {found[0]}"
    return f"ranks {', '.join(found[:-1])} and {found[-1]}" if found else "no rank"
