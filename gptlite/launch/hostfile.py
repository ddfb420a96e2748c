"""Start of a run on several machines from a host file with lines `HOST slots=RANKS`, as in MPI and DeepSpeed."""

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

from gptlite.config.batch import check_world
from gptlite.config.compose import load
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.invocation import arguments, python
from gptlite.launch.starter import starter

FLAG, PORT_FLAG = "--hostfile", "--master-port"
PORT = 29500  # torchrun's default
RESTARTS = 100  # of the workers of an elastic run, at most
NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torchrun's variable: each world of an elastic run has a store


@dataclass(frozen=True)
class Host:
    """Machine in a host file, and its number of ranks."""

    name: str
    slots: int


def take_flags(words: Sequence[str]) -> tuple[str | None, int, list[str]]:
    """Return the values of --hostfile, None if it is absent, and of --master-port, and the other words of a command
    line. Raises ConfigError."""
    file, rest = _take(FLAG, words, "a file with a line `HOST slots=RANKS` for each machine")
    port, rest = _take(PORT_FLAG, rest, "a port that is free on the first machine")
    if port is None:
        return file, PORT, rest
    if file is None:
        raise ConfigError(f"{PORT_FLAG}={port} has no use without {FLAG}; leave it out")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{PORT_FLAG}={port} is not a port; give a number from 1 to 65535")
    return file, int(port), rest


def _take(flag: str, words: Sequence[str], what: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag, None if it is absent, and the other words."""
    rest = list(words)
    for index, word in enumerate(rest):
        if word == flag or word.startswith(flag + "="):
            value = word.partition("=")[2] if "=" in word else "".join(rest[index + 1 : index + 2])
            del rest[index : index + 1 + (word == flag)]
            if not value or value.startswith("-"):
                raise ConfigError(f"{flag} has no value; give {what}")
            if any(each.partition("=")[0] == flag for each in rest):
                raise ConfigError(f"{flag} is given twice; give it once")
            return value, rest
    return None, rest


def run(file: str, port: int, overrides: list[str]) -> NoReturn:
    """Replace this process by torchrun for this machine's ranks. The first machine prints the commands of the others.

    `port` of the first machine is the rendezvous. Raises ConfigError for an invalid file, an unlisted machine, a layout
    that does not fill the slots, or a port in use.
    """
    if outer := starter():
        raise ConfigError(
            f"{FLAG}={file} has no use under {outer.name}, which has already started the ranks; leave {FLAG} out"
        )
    if flags := [each for each in overrides if each.startswith("-")]:
        raise ConfigError(f"{FLAG} trains a single run; leave out {flags[0]}")
    hosts = read_hosts(Path(file))
    config = load(overrides)
    check_slots(config, hosts, file)
    node = this_machine(hosts, file)
    start = elastic_torchrun if config.parallelism.elastic else torchrun
    variables = {NOT_SHARED: "1"} if config.parallelism.elastic else {}
    if node == 0:
        refuse_used_port(port)
        before = "".join(f"{name}={value} " for name, value in variables.items())
        for number, host in enumerate(hosts[1:], 1):
            words = [python(), *start(hosts, number, port, overrides)]
            print(f"on {host.name}:  cd {shlex.quote(os.getcwd())} && {before}{shlex.join(words)}", flush=True)
    os.environ.update(variables)  # torchrun's, like its options
    os.execv(sys.executable, [sys.executable, *start(hosts, node, port, overrides)])


def read_hosts(path: Path) -> list[Host]:
    """Return the machines of a host file, in order. Raises ConfigError with the line that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{FLAG}={path} cannot be read: {reason}; give the path of a host file") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := line.partition("#")[0].strip()):
            continue
        match = re.fullmatch(r"([\w.:-]+)\s+slots\s*=\s*(\d{1,6})", line)
        if not match or int(match[2]) < 1:
            raise ConfigError(f"{path}, line {number}: {line!r} is not HOST slots=RANKS; write e.g. node1 slots=8")
        if match[1] in hosts:
            raise ConfigError(f"{path}, line {number}: {match[1]} is listed twice; write one line with all its slots")
        hosts[match[1]] = Host(match[1], int(match[2]))
    if not hosts:
        raise ConfigError(f"{path} lists no host; give a line `HOST slots=RANKS` for each machine")
    return list(hosts.values())


def check_slots(config: Config, hosts: Sequence[Host], file: str) -> None:
    """Raise ConfigError if the layout's number of ranks is not the number of slots on all machines."""
    total = sum(host.slots for host in hosts)
    if config.parallelism.auto or config.parallelism.elastic:  # all slots, or the largest layout on them
        return
    try:
        check_world(config, total)
    except ConfigError as error:
        raise ConfigError(f"{file} has {total} slots on {len(hosts)} machines: {error}") from None


def this_machine(hosts: Sequence[Host], file: str, is_here: Callable[[str], bool] | None = None) -> int:
    """Return this machine's index in `hosts`. Raises ConfigError if the machine is not listed, or more than once."""
    indices = [index for index, host in enumerate(hosts) if (is_here or names_this_machine)(host.name)]
    names = [hosts[index].name for index in indices]
    if len(hosts) > 1 and (loopback := [each for each in names if re.match(r"localhost$|127\.|::1$", each)]):
        raise ConfigError(f"{file}: other machines cannot reach {loopback[0]}; give this machine's name or address")
    if len(indices) > 1:
        raise ConfigError(f"{file}: {' and '.join(names)} are all this machine; write one line with all its slots")
    if not indices:
        listed = ", ".join(host.name for host in hosts)
        raise ConfigError(f"{file}: this machine, {socket.gethostname()}, is not among {listed}; add a line for it")
    return indices[0]


def names_this_machine(host: str) -> bool:
    """Return True if a name or an address is this machine's. Only a local address can be bound."""
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


def refuse_used_port(port: int) -> None:
    """Raise ConfigError if a port of this machine cannot be listened on, e.g. since another run does."""
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"port {port} of this machine: {os.strerror(error.errno or 0).lower()}; give another one on all machines, "
            f"e.g. {PORT_FLAG}={port + 1 if port < 65535 else PORT}"
        ) from None


def torchrun(hosts: Sequence[Host], node: int, port: int, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of Python that start the ranks of machine number `node` under torchrun."""
    return [
        *("-m", "torch.distributed.run"),
        *(f"--nnodes={len(hosts)}", f"--node-rank={node}", f"--nproc-per-node={hosts[node].slots}"),
        *(f"--master-addr={hosts[0].name}", f"--master-port={port}"),
        *arguments("train"),
        *overrides,
    ]


def elastic_torchrun(hosts: Sequence[Host], node: int, port: int, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of Python that start the ranks of machine number `node` in an elastic run, which needs at
    least one machine. The first one hosts the rendezvous. Raises ConfigError if machines have unequal slots."""
    if len({host.slots for host in hosts}) > 1:
        raise ConfigError(
            f"{FLAG}: parallelism.elastic=true needs equal slots on all machines, not "
            f"{', '.join(f'{host.name} slots={host.slots}' for host in hosts)}; write the lowest number for all"
        )
    return [
        *("-m", "torch.distributed.run"),
        *(f"--nnodes=1:{len(hosts)}", f"--nproc-per-node={hosts[node].slots}", f"--max-restarts={RESTARTS}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:{port}", f"--rdzv-id={port}"),
        f"--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,is_host={int(node == 0)}",
        *arguments("train"),
        *overrides,
    ]
