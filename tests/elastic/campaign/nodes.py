"""Nodes of a campaign: network namespaces on a bridge, each with a torchrun agent (Linux, as root).

The rendezvous store is a process in a namespace of its own, which never fails. Whatever happens, the namespaces and all
processes in them are gone at the end.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
TRAIN = ROOT / "train.py"
LINK = "node0"  # network device of a node
PORT = 29400
# A store without ranks of its own. It ends with the campaign, even if that is killed.
STORE = f"""
import ctypes, signal, torch.distributed as dist
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
store = dist.TCPStore("10.81.0.1", {PORT}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
signal.pause()
"""
# A silent agent is out after 6 s instead of 15, and a round begins 2 s after the last node has joined instead of 30.
RENDEZVOUS = "last_call_timeout=2,is_host=false,keep_alive_interval=2"
# The mount is that of this process and its children: /dev/shm is a node's own, as on machines.
SHARED = 'mount --bind "$1" /dev/shm && shift && exec "$@"'


@dataclass
class Node:
    """One machine: its namespace, its agent, and files of what the agent has printed."""

    number: int
    name: str
    folder: Path
    shared: Path  # its /dev/shm
    temporary: Path  # its /tmp; a short path, for sockets
    agent: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def errors(self) -> Path:
        return self.folder / f"node-{self.number}.err"

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def ranks(self) -> list[int]:
        """Processes that train: those with torch, but for the agent and what has such children (a keeper)."""
        with_torch = [pid for pid in self.pids() if self.agent and pid != self.agent.pid and _has_torch(pid)]
        parents = {_parent(pid) for pid in with_torch}
        return sorted(pid for pid in with_torch if pid not in parents)

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def send(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Network:
    """The nodes of one run, and the switch between them."""

    name: str
    folder: Path
    nodes: list[Node] = field(default_factory=list)

    def start(self, node: Node, command: list[str], ranks: int) -> None:
        """Start a node's agent. Any number of nodes, of `ranks` ranks each, trains."""
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes=1:{len(self.nodes)}", f"--nproc-per-node={ranks}", "--max-restarts=100"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=10.81.0.1:{PORT}", f"--rdzv-id={self.name}"),
            *(f"--rdzv-conf={RENDEZVOUS}", f"--local-addr={address(node.number)}"),
        ]
        shared = ["sh", "-c", SHARED, "sh", str(node.shared)]
        words = ["ip", "netns", "exec", node.name, *shared, *torchrun, str(TRAIN), *command]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(node.temporary),
            "LOGLEVEL": "INFO",  # torchrun's lines on restarts
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as gptlite asks for
        }
        node.starts += 1
        with open(node.folder / f"node-{node.number}.out", "ab") as out, open(node.errors, "ab") as errors:
            node.agent = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
            )

    def cable(self, node: Node, plugged: bool) -> None:
        """Cut a node's link at the switch, or join it."""
        _ip("-n", self.name, "link", "set", f"port{node.number}", "up" if plugged else "down")

    def left(self) -> list[str]:
        """What nodes have left: processes, and files of shared memory."""
        found = [f"process {pid} of node {node.number}: {_words(pid)}" for node in self.nodes for pid in node.pids()]
        return found + [f"shared memory {path}" for node in self.nodes for path in node.shared.iterdir()]


def address(number: int) -> str:
    """The address of a node; .1 is the store."""
    return f"10.81.0.{number + 2}"


@contextlib.contextmanager
def network(count: int, folder: Path) -> Iterator[Network]:
    """Nodes, a switch and a running store. All are deleted at the end."""
    made = Network(f"campaign-{os.getpid()}", folder)
    shared = Path(f"/dev/shm/{made.name}")
    temporary = Path(tempfile.mkdtemp(prefix="campaign-"))
    store_name, processes = f"{made.name}-store", []
    for number in range(count):
        places = shared / str(number), temporary / str(number)
        made.nodes.append(Node(number, f"{made.name}-{number}", folder, *places))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` has its turn
    try:
        for node in made.nodes:
            node.shared.mkdir(parents=True)
            node.temporary.mkdir()
        for name in (made.name, store_name, *(node.name for node in made.nodes)):
            _ip("netns", "add", name)
        _ip("-n", made.name, "link", "add", "bridge", "type", "bridge")
        _ip("-n", made.name, "link", "set", "bridge", "up")
        _join(made.name, store_name, "store", "10.81.0.1")
        for node in made.nodes:
            _join(made.name, node.name, f"port{node.number}", address(node.number))
        words = ["ip", "netns", "exec", store_name, sys.executable, "-c", STORE]
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True))
        if processes[0].stdout.readline() != b"ready\n":
            raise OSError("the rendezvous store did not start")
        yield made
    finally:
        for node in made.nodes:
            node.kill(node.pids())
            if node.agent is not None:
                node.agent.wait()
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
        for name in (*(node.name for node in made.nodes), store_name, made.name):
            _ip("netns", "delete", name, check=False)
        shutil.rmtree(shared, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def settled(made: Network, seconds: float) -> list[str]:
    """What nodes have left once processes had some time to end."""
    deadline = time.monotonic() + seconds
    while (left := made.left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _join(switch: str, name: str, port: str, ip: str) -> None:
    _ip("link", "add", "name", LINK, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", name, "address", "add", f"{ip}/24", "dev", LINK)
    for device in (LINK, "lo"):
        _ip("-n", name, "link", "set", device, "up")


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check)


def _has_torch(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    return "ended"
