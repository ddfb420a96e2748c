"""Setup and teardown of the default process group, from torchrun's environment variables."""

import os
import socket
import struct
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

SIOCGIFADDR = 0x8915  # Linux: an interface's address
NOWHERE = "192.0.2.1"  # documentation address (RFC 5737), which takes the default route


def join(timeout_seconds: float) -> None:
    """Join the group described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with NCCL if there are GPUs, otherwise
    with gloo.

    With GPUs, the current device is set to the GPU with number LOCAL_RANK, or to the only visible one. A collective
    that takes longer than `timeout_seconds` fails. Raises torch.distributed.DistError if the other ranks cannot be
    reached.
    """
    timeout = timedelta(seconds=timeout_seconds)
    _choose_interfaces()
    if torch.cuda.is_available():
        # Under srun, each rank may see only its own GPU.
        local_rank = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(local_rank)
        # With device_id NCCL connects now, not in the first collective.
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo", timeout=timeout)


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


def leave() -> None:
    """Destroy the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_text(text: str) -> str:
    """Return rank 0's text on every rank."""
    from gptlite.parallelism.collectives import broadcast_bytes  # imports FSDP, which the launcher does without

    return broadcast_bytes(text.encode()).decode()


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
