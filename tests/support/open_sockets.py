"""Which sockets of a process and its children others can reach, by the kernel's own tables."""

import contextlib
import ipaddress
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil

LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""Tables of /proc/net, and the state in them of a socket that waits for anybody."""

NOBODY = 65534
KNOCK = f"""
import os, socket, sys
os.setuid({NOBODY})  # after Python, which may lie where nobody may read
for name in sys.argv[1:]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as knock:
            knock.settimeout(20)
            try:
                knock.connect("\\0" + name)
                if knock.recv(64):  # libzmq greets whom it admits
                    print(name, flush=True)
            except (ConnectionError, OSError) as error:
                if isinstance(error, TimeoutError):
                    print(name, flush=True)
"""


def listening(process: psutil.Process) -> dict[str, list[str]]:
    """ "tcp" and "udp" -> "ADDRESS:PORT" of sockets of a process and its children that wait for
    anybody; "files" -> paths of Unix sockets; "abstract" -> names of those without a file."""
    found: dict[str, list[str]] = {"tcp": [], "udp": [], "files": [], "abstract": []}
    inodes = _inodes([process, *process.children(recursive=True)])
    for table, state in LISTENS.items():
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                found[table[:3]].append(_address(fields[1]))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        accepts = int(fields[3], 16) & 0x10000  # __SO_ACCEPTCON
        if accepts and fields[6] in inodes and len(fields) > 7:
            is_abstract = fields[7].startswith("@")
            found["abstract" if is_abstract else "files"].append(fields[7].removeprefix("@"))
    return found


def reachable(found: dict[str, list[str]]) -> list[str]:
    """Sockets of `listening` that other hosts reach; Unix ones that other users here reach."""
    others = []
    for place in (*found["tcp"], *found["udp"]):
        if not ipaddress.ip_address(place.rpartition(":")[0]).is_loopback:
            others.append(place)
    for path in found["files"]:
        folder = Path(path).parent.stat()
        if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
            others.append(path)
    if found["abstract"] and os.getuid() == 0:
        # Everybody sees the names: only the listener itself can turn others away.
        knock = [sys.executable, "-c", KNOCK, *found["abstract"]]
        run = subprocess.run(knock, capture_output=True, text=True, check=True)
        others += run.stdout.split()
    return others


def second_address() -> str | None:
    """An address of this host that is no loopback one; None where it has none."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            is_ip = each.family == socket.AF_INET
            if is_ip and not ipaddress.ip_address(each.address).is_loopback:
                return str(each.address)
    return None


def _inodes(processes: list[psutil.Process]) -> set[str]:
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            for entry in os.scandir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                        inodes.add(match[1])
    return inodes


def _address(text: str) -> str:
    """ "0100007F:1F90" is "127.0.0.1:8080": words of the host's byte order, in hexadecimal."""
    host, port = text.split(":")
    data = bytes.fromhex(host)
    words = [data[at : at + 4] for at in range(0, len(data), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"
