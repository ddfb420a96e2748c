"""Two machines on one: torchrun in two network namespaces that only a veth pair joins, two ranks in each.

    python two_machines.py KEY=VALUE...                    trains with train.py on the four ranks (Linux, as root)
    python two_machines.py --hostfile FILE KEY=VALUE...    the same, where train.py starts torchrun itself

Exits with the code of the first machine's torchrun. Whatever happens, the namespaces and all in them are gone at the
end.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).parents[3] / "train.py"
RANKS_PER_MACHINE = 2
LIMIT_SECONDS = 240


def main(overrides: list[str]) -> int:
    """Sets up, trains, tears down."""
    names = [f"gptlite-{os.getpid()}-{number}" for number in (1, 2)]
    links = [f"gl{os.getpid() % 10**8}a", f"gl{os.getpid() % 10**8}b"]
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` has its turn
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(names, 1):
            processes.append(subprocess.Popen(machine(number, name, overrides)))
        return wait(processes)
    finally:
        for name in names:
            for pid in pids(name):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.kill()
            process.wait()
        for name in names:
            ip("netns", "delete", name, check=False)  # the pair of links goes with them


def machine(number: int, name: str, overrides: list[str]) -> list[str]:
    """What a person types on one machine; and since both have one host name, which of them this is."""
    torchrun = [
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes=2", f"--nproc-per-node={RANKS_PER_MACHINE}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29577", "--rdzv-id=two-machines"),
        *(f"--local-addr=10.77.0.{number}", f"--rdzv-conf=is_host={int(number == 1)}"),
    ]
    start = [sys.executable] if "--hostfile" in overrides else torchrun
    return ["ip", "netns", "exec", name, *start, str(TRAIN), *overrides]


def wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first, once both have ended. Raises TimeoutError."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done after {LIMIT_SECONDS} s")
        time.sleep(0.1)
    return next((process.returncode for process in processes if process.returncode), 0)


def ip(*arguments: str, check: bool = True) -> None:
    """iproute2's command."""
    subprocess.run(["ip", *arguments], check=check)


def pids(name: str) -> list[int]:
    """The processes in a namespace."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
