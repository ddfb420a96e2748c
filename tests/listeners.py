"""TCP sockets on which processes listen."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp


def listening(processes: Iterable[int]) -> list[IPv4Address | IPv6Address]:
    """The addresses on which these processes listen, as the kernel reports them."""
    held = set()
    for process in processes:
        for path in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                held.add(os.readlink(path))
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTENS and f"socket:[{inode}]" in held:
                    found.append(_address(local.partition(":")[0]))
    return found


def _address(digits: str) -> IPv4Address | IPv6Address:
    """An address that the kernel prints as words of four bytes in its own order."""
    words = [bytes.fromhex(digits[start : start + 8]) for start in range(0, len(digits), 8)]
    packed = b"".join(socket.htonl(int.from_bytes(word, "big")).to_bytes(4, "big") for word in words)
    if len(packed) == 4:
        return IPv4Address(packed)
    found = IPv6Address(packed)
    return found.ipv4_mapped or found
