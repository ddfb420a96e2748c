"""Setup and teardown of the default process group, from torchrun's environment variables."""

import os
import socket
import struct
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from gptlite.errors import ConfigError

SIOCGIFADDR = 0x8915  # Linux: an interface's address
NOWHERE = "192.0.2.1"  # documentation address (RFC 5737), which takes the default route
RESOLVE_SECONDS = 20.0  # a new machine's name may take a while to appear in the name service


def join(timeout_seconds: float, claim: bool = False, place: tuple[Store | None, int, int] = (None, -1, -1)) -> None:
    """Join the group described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with NCCL if there are GPUs, otherwise
    with gloo.

    With GPUs, the current device is set to the GPU with number LOCAL_RANK, or to the only visible one. A collective
    that takes longer than `timeout_seconds` fails. Raises ConfigError if rank 0's address does not exist or its port is
    in use, with `claim` also if another rank uses this rank's GPU, and torch.distributed.DistError if the other ranks
    cannot be reached. `place` are a store, the rank and the world size, instead of those of the variables.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world = place
    if store is None:
        _refuse_address()
    _choose_interfaces()
    if torch.cuda.is_available():
        # Under srun, each rank may see only its own GPU.
        local_rank = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(local_rank)
        if claim:
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
            store.set_timeout(timeout)
            claim_gpu(store, rank, world, str(torch.cuda.get_device_properties(local_rank).uuid))
        # With device_id NCCL connects now, not in the first collective.
        device = torch.device("cuda", local_rank)
        dist.init_process_group("nccl", timeout=timeout, store=store, rank=rank, world_size=world, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=world)


def claim_gpu(store: Store, rank: int, world: int, gpu: str) -> None:
    """Raise ConfigError on all ranks if two of them use the same GPU, which `gpu` identifies among all machines.

    NCCL would fail with an error that names no variable.
    """
    first = store.compare_set(f"gptlite/gpu/{gpu}", "", str(rank)).decode()
    if first != str(rank):
        where = f"ranks {first} and {rank} both use GPU {gpu} of {socket.gethostname()}"
        store.set("gptlite/shared", where)
    if store.add("gptlite/claimed", 1) == world:
        store.set("gptlite/all", "1")
    store.wait(["gptlite/all"])
    if not store.check(["gptlite/shared"]):
        return
    shared, until = store.get("gptlite/shared").decode(), time.monotonic() + RESOLVE_SECONDS
    store.add("gptlite/told", 1)
    while rank == 0 and store.add("gptlite/told", 0) < world and time.monotonic() < until:
        time.sleep(0.05)  # the store ends with rank 0
    raise ConfigError(
        f"{shared}, since LOCAL_RANK is not set; set LOCAL_RANK to 0, 1, ... for the ranks of each machine, or start "
        "them with torchrun"
    )


def join_alone(timeout_seconds: float) -> None:
    """Initialise a process group of one rank, which FSDP2 needs on a single device."""
    timeout, store = timedelta(seconds=timeout_seconds), HashStore()  # in this process's memory: needs no port
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", timeout=timeout, store=store, rank=0, world_size=1, device_id=device)
    else:
        if "GLOO_SOCKET_IFNAME" not in os.environ and (name := _loopback()):
            os.environ["GLOO_SOCKET_IFNAME"] = name
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=0, world_size=1)


def leave_group() -> None:
    """Destroy the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_address() -> None:
    """Raise ConfigError if rank 0's address does not resolve, which torch would try for minutes, or if this is rank 0
    and cannot listen on its port."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:  # UnicodeError: no name can have such a part
            if time.monotonic() > until:
                raise ConfigError(
                    f"MASTER_ADDR={host} does not resolve: {error}; set it to the name or address of rank 0's machine"
                ) from None
            time.sleep(0.5)
    # Under torchrun and our launcher, another process already listens.
    if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            with socket.create_server(("", port)):
                pass
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise ConfigError(f"MASTER_PORT={port} of rank 0's machine: {reason}; set another MASTER_PORT") from None


def _choose_interfaces() -> None:
    """Have gloo, which also serves a run on GPUs, and NCCL listen on loopback if all ranks are on this machine.

    Otherwise gloo uses an interface that reaches rank 0, and NCCL chooses. The user's choice comes first.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    found = {"GLOO_SOCKET_IFNAME": _loopback() if local else _interface()}
    if local:
        found["NCCL_SOCKET_IFNAME"] = _loopback()
    for variable, name in found.items():
        if name is not None:
            os.environ.setdefault(variable, name)


def _interface() -> str | None:
    """Return an interface that reaches rank 0. If none is found, return None: gloo then uses the interface that the
    host name resolves to."""
    # On rank 0's machine, MASTER_ADDR may resolve to loopback, which the other machines cannot reach.
    for host in (os.environ["MASTER_ADDR"], NOWHERE):
        if (address := _address_towards(host)) and not address.startswith("127."):
            return _interface_of(address)
    return None


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def _address_towards(host: str) -> str | None:
    """Return this machine's source IPv4 address for packets to a host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return probe.getsockname()[0]
        except OSError:
            return None


def _interface_of(address: str) -> str | None:
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            # struct ifreq: 16 bytes of name, then a sockaddr_in with the address from its byte 4 on.
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
