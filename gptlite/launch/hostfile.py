"""Several machines from a host file, `HOST slots=RANKS` a line, as MPI and DeepSpeed read it."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gptlite.config import Config, load
from gptlite.config.batch import check_world
from gptlite.errors import ConfigError
from gptlite.invocation import arguments, python
from gptlite.launch.starter import starter

FLAG = "--hostfile"
PORT = 29500  # torchrun's


@dataclass(frozen=True)
class Host:
    """Machine of a host file and its number of ranks."""

    name: str
    slots: int


def take_flag(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split a command line into the value of --hostfile, None without it, and the other words."""
    rest = list(words)
    for index, word in enumerate(rest):
        if word == FLAG or word.startswith(FLAG + "="):
            value = word.partition("=")[2] if "=" in word else "".join(rest[index + 1 : index + 2])
            del rest[index : index + 1 + (word == FLAG)]
            if not value or value.startswith("-"):
                raise ConfigError(f"{FLAG} needs a file with a line `HOST slots=RANKS` for each machine")
            if any(each.startswith(FLAG) for each in rest):
                raise ConfigError(f"{FLAG} is given twice; list all machines in one file")
            return value, rest
    return None, rest


def run(file: str, overrides: list[str]) -> NoReturn:
    """Become torchrun for this machine's ranks. The first machine also prints the command of each other one.

    Raises ConfigError for a file, a machine or a layout that does not fit.
    """
    if outer := starter():
        raise ConfigError(f"{FLAG} under {outer.name}: it has started the ranks itself; leave {FLAG} out")
    if flags := [each for each in overrides if each.startswith("-")]:
        raise ConfigError(f"{FLAG} trains one run; leave out {flags[0]}")
    hosts = read(Path(file))
    check_slots(load(overrides), hosts, file)
    node = this_machine(hosts, file)
    if node == 0:
        for number, host in enumerate(hosts[1:], 1):
            words = [python(), *torchrun(hosts, number, overrides)]
            print(f"on {host.name}:  cd {shlex.quote(os.getcwd())} && {shlex.join(words)}", flush=True)
    os.execv(sys.executable, [sys.executable, *torchrun(hosts, node, overrides)])


def read(path: Path) -> list[Host]:
    """Return the machines of a host file, in order. Raises ConfigError with the line that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG}={path} cannot be read: {error}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := line.partition("#")[0].strip()):
            continue
        match = re.fullmatch(r"([\w.:-]+)\s+slots\s*=\s*(\d+)", line)
        if not match or int(match[2]) < 1:
            raise ConfigError(f"{path}, line {number}: {line!r} is not HOST slots=RANKS, such as node1 slots=8")
        if match[1] in hosts:
            raise ConfigError(f"{path}, line {number}: {match[1]} is listed twice; give it one line with all its slots")
        hosts[match[1]] = Host(match[1], int(match[2]))
    if not hosts:
        raise ConfigError(f"{path} lists no host; give a line `HOST slots=RANKS` for each machine")
    return list(hosts.values())


def check_slots(config: Config, hosts: Sequence[Host], file: str) -> None:
    """Raise ConfigError if the layout does not fill the slots of all machines."""
    total = sum(host.slots for host in hosts)
    if config.parallelism.auto:  # the planner takes all ranks there are
        return
    try:
        check_world(config, total)
    except ConfigError as error:
        raise ConfigError(f"{file} has {total} slots on {len(hosts)} machines: {error}") from None


def this_machine(hosts: Sequence[Host], file: str, is_here: Callable[[str], bool] | None = None) -> int:
    """Return this machine's index among the hosts. Raises ConfigError if it is none of them, or several."""
    found = [index for index, host in enumerate(hosts) if (is_here or names_this_machine)(host.name)]
    names = [hosts[index].name for index in found]
    if len(hosts) > 1 and (loopback := [each for each in names if re.match(r"localhost$|127\.|::1$", each)]):
        raise ConfigError(f"{file}: other machines do not reach {loopback[0]}; give this machine's name or address")
    if len(found) > 1:
        raise ConfigError(f"{file}: {' and '.join(names)} are both this machine; give it one line with all its slots")
    if not found:
        listed = ", ".join(host.name for host in hosts)
        raise ConfigError(f"{file}: this machine, {socket.gethostname()}, is not among {listed}; add its line")
    return found[0]


def names_this_machine(host: str) -> bool:
    """Return True if a name or an address is this machine's: only its own addresses can be bound."""
    own = socket.gethostname()
    if host in (own, own.partition(".")[0]):
        return True
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def torchrun(hosts: Sequence[Host], node: int, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of Python that start one machine's ranks under torchrun."""
    return [
        *("-m", "torch.distributed.run"),
        *(f"--nnodes={len(hosts)}", f"--node-rank={node}", f"--nproc-per-node={hosts[node].slots}"),
        *(f"--master-addr={hosts[0].name}", f"--master-port={PORT}"),
        *arguments("train"),
        *overrides,
    ]
