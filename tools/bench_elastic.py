"""Benchmark of the loss of a node: seconds to the next step, and samples lost, of gptlite and of torchft.

python tools/bench_elastic.py [runs=memory,disk,torchft,torchft-ddp] [lost=node] [times=3] [steps=80] [at=30] [batch=8]
    [torchft=PYTHON] [more='KEY=VALUE ...'] [out=FOLDER]

Two nodes of one rank and one thread train GPT-lite's sizes on this machine. After `at` steps, kill -9 ends all of the
second node (lost=node) or its rank alone (lost=rank). A lost node is started again once the other one has trained for
3 steps, and joins. `memory` and `disk` are gptlite with checkpoints in memory every 5 steps or on disk every 10;
`torchft` and `torchft-ddp` need the Python of an environment with torchft 0.2.0 (tools/torchft_rank.py). Prints:

    next      seconds from the kill to the next step of the other node
    pause     seconds without a step as the node comes back
    repeated  steps that are trained again from a restored state, in whose place the first ones are gone
    lost      samples of the first `steps` batches that no step of the result has used
    twice     samples that two steps of the result have used
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError

ROOT = Path(__file__).parents[1]
BANNER = "== gptlite ="  # line of train.log with which a start begins
LENGTH = 256  # tokens of a sample
LIMIT_SECONDS = 600  # for any one thing, on a machine with other work
PLACES = {
    "memory": "checkpoint.memory_interval=5 checkpoint.replicas=1 checkpoint.interval=0",
    "disk": "checkpoint.interval=10",
}
TORCHFT = {"torchft": "allreduce", "torchft-ddp": "ddp"}
COMMON = """
model=gpt-lite data=synthetic data.vocab_size=256 data.num_tokens=1000000 data.micro_batch_size=4 precision=fp32 seed=1
schedule=constant optimizer.lr=3e-4 parallelism.data=elastic
trainer.log_interval=1 trainer.eval_interval=0 trainer.eval_samples=4 trainer.sample_tokens=0 checkpoint.keep=2
""".split()
RENDEZVOUS = "last_call_timeout=1,is_host=false,keep_alive_interval=1"  # of the seconds to the next step, 3 + 1
FOLLOW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as gptlite asks for under torchrun
COLUMNS = ("next", "pause", "repeated", "lost", "twice", "wall")
Row = dict[str, Any]


@dataclass
class Arguments:
    """Command-line arguments."""

    runs: str = "memory,disk"
    lost: str = "node"
    times: int = 3
    steps: int = 80
    at: int = 30
    batch: int = 8
    torchft: str = ""
    more: str = ""
    out: str = "outputs/elastic"


def main(arguments: Arguments) -> None:
    """Run everything and print the table."""
    runs = arguments.runs.split(",")
    if unknown := set(runs) - {*PLACES, *TORCHFT}:
        raise ConfigError(f"runs={arguments.runs}: {', '.join(unknown)} is none of {', '.join((*PLACES, *TORCHFT))}")
    if arguments.lost not in ("node", "rank"):
        raise ConfigError(f"lost={arguments.lost} is none of node, rank")
    if set(runs) & set(TORCHFT) and not arguments.torchft:
        raise ConfigError("runs=torchft needs torchft=PYTHON of an environment with torchft 0.2.0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` has its turn
    out, rows = Path(arguments.out).resolve(), []
    print(f"{'run':<13}" + "".join(f"{name:>10}" for name in COLUMNS), flush=True)
    for name in runs:
        for number in range(arguments.times):
            folder = out / f"{name}-{number}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            rows.append({"run": name, "lost_what": arguments.lost} | _row(arguments, name, folder))
            print(_line(f"{name} {number}", rows[-1]), flush=True)
        of = [row for row in rows if row["run"] == name]
        print(_line(name, {key: _median([row[key] for row in of]) for key in COLUMNS}))
    (out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")


def _median(values: list[float | None]) -> float | None:
    """Return the median of the values that are known; None if none is, as the pause of a lost rank."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _line(name: str, row: Row) -> str:
    return f"{name:<13}" + "".join(f"{row[key]:10.1f}" if row[key] is not None else f"{'-':>10}" for key in COLUMNS)


class Steps:
    """Steps of a run so far. A restart of gptlite removes the rows that it will write again, so they are collected."""

    def __init__(self, name: str, folder: Path) -> None:
        self._read, self._folder = _torchft_rows if name in TORCHFT else _gptlite_rows, folder
        self._rows: list[Row] = []

    def now(self) -> list[Row]:
        """Return the rows of all steps, in the order of their time. `world` changes with the ranks that train."""
        last = self._rows[-1]["at"] if self._rows else 0.0
        fresh = [row for row in self._read(self._folder) if row["at"] > last]
        log = self._folder / "run/train.log"  # read after the rows: a start's rows come long after its banner
        starts = log.read_text(errors="replace").count(BANNER) if log.exists() else 0
        self._rows += [row | {"world": row.get("replicas", starts)} for row in fresh]
        return self._rows


def _row(arguments: Arguments, name: str, folder: Path) -> Row:
    """Train with one loss, and return its numbers."""
    steps, back = Steps(name, folder), float("inf")
    with contextlib.ExitStack() as stack:
        start = stack.enter_context((_torchft if name in TORCHFT else _gptlite)(arguments, name, folder))
        nodes, began = [start(0), start(1)], time.time()
        try:
            _wait(nodes, lambda: any(row["step"] >= arguments.at for row in steps.now()))
            before, at, world = len(steps.now()), time.time(), steps.now()[-1]["world"]
            tree = _tree(nodes[1].pid)
            _kill(tree if arguments.lost == "node" else _trains(tree))
            _wait(nodes[:1], lambda: sum(row["world"] != world for row in steps.now()[before:]) >= 3)
            if arguments.lost == "node":
                nodes[1].wait()
                back = time.time()
                nodes[1] = start(1)
            _wait([], lambda: steps.now()[-1]["step"] >= arguments.steps)
            for node in nodes:
                node.wait(LIMIT_SECONDS)
        finally:
            for node in nodes:
                _kill(_tree(node.pid) if node.poll() is None else [])
                node.wait()
    if codes := [node.returncode for node in nodes if node.returncode]:
        raise ConfigError(f"{name}: exit codes {codes}; read {folder}/*.log")
    rows = steps.now()
    restarted = next(row for row in rows[before:] if row["world"] != world)
    # torchft's steps go on while the node comes back: the longest time between two of them is its pause.
    since = [row for row in rows if row["at"] >= back]
    joined = next((place for place, row in enumerate(since) if row["world"] != restarted["world"]), -1)
    times = [max(row["at"] for row in rows if row["at"] < back), *(row["at"] for row in since[: joined + 1])]
    return {
        "next": restarted["at"] - at,
        "pause": max((later - earlier for earlier, later in pairwise(times)), default=None),
        "wall": rows[-1]["at"] - began,
        **_samples(rows, arguments, folder),
    }


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _samples(rows: list[Row], arguments: Arguments, folder: Path) -> Row:
    """Return how many of the samples of the first batches the result has not used, or twice."""
    result = {row["step"]: row for row in rows}  # the last row of a step is the one whose update has stayed
    repeated = len(rows) - len(result)
    used: Counter[int] = Counter()
    for row in (row for row in rows if row is result[row["step"]]):
        used.update(row["samples"])
    anew = max((row["at"] for last, row in pairwise(rows) if row["step"] <= last["step"]), default=0.0)
    for row in _others(folder):  # of torchft's second group, but for steps whose result all groups have lost
        used.update(row["samples"] if row["at"] >= anew else [])
    lost = [number for number in range(arguments.steps * arguments.batch) if not used[number]]
    return {"repeated": repeated, "lost": len(lost), "twice": sum(count > 1 for count in used.values())}


def _gptlite_rows(folder: Path) -> list[Row]:
    """Return a row for each step. Samples are used in order, and `tokens` counts them."""
    rows = [row for row in _read(folder / "run/metrics.jsonl") if "loss" in row]
    before = 0
    for row in rows:
        row["at"], stop = datetime.fromisoformat(row["time"]).timestamp(), row["tokens"] // LENGTH
        row["samples"], before = list(range(before, stop)), stop
    return rows


def _torchft_rows(folder: Path) -> list[Row]:
    """Return the committed steps of the first replica group, which is never lost."""
    return _read(folder / "0.jsonl")


def _others(folder: Path) -> list[Row]:
    return _read(folder / "1.jsonl")


def _read(path: Path) -> list[Row]:
    """Return the rows of a JSONL file, but for a last one that is being written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def _gptlite(arguments: Arguments, name: str, folder: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Return a function that starts a node's torchrun. The rendezvous store is in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", f"--rdzv-id={folder.name}"),
        *(f"--rdzv-conf={RENDEZVOUS}", "--local-addr=127.0.0.1"),
    ]
    keys = [f"data.global_batch_size={arguments.batch}", f"trainer.max_steps={arguments.steps}"]
    keys += [f"run.dir={folder / 'run'}", *COMMON, *PLACES[name].split(), *arguments.more.split()]

    def start(number: int) -> subprocess.Popen[bytes]:
        return _start([*torchrun, str(ROOT / "train.py"), *keys], folder / f"node-{number}.log", FOLLOW)

    yield start


@contextlib.contextmanager
def _torchft(arguments: Arguments, name: str, folder: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Return a function that starts a replica group's torchrun. The lighthouse has the settings of torchft's README."""
    port = _free_port()
    binary = Path(arguments.torchft).parent / "torchft_lighthouse"
    words = [str(binary), "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    lighthouse = _start([*words, "--bind", f"[::]:{port}"], folder / "lighthouse.log", {})
    torchrun = [arguments.torchft, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]

    def start(number: int) -> subprocess.Popen[bytes]:
        own = [f"--master-port={_free_port()}", "--max-restarts=10", str(ROOT / "tools/torchft_rank.py")]
        words = [*torchrun, *own, TORCHFT[name], str(arguments.steps), str(arguments.batch), str(folder)]
        variables = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "REPLICA_GROUP_ID": str(number)}
        return _start(words, folder / f"node-{number}.log", variables)

    try:
        yield start
    finally:
        lighthouse.kill()
        lighthouse.wait()


def _start(command: list[str], log: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables
    with open(log, "ab") as file:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen[bytes](command, env=environment, start_new_session=True, **streams)


def _wait(nodes: list[subprocess.Popen[bytes]], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not done():
        if time.monotonic() > deadline or any(node.poll() is not None for node in nodes):
            raise ConfigError(f"no progress within {LIMIT_SECONDS} s, or a node has ended")
        time.sleep(0.02)


def _tree(pid: int) -> list[int]:
    """Return a process and all that it has started, itself or through them."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,sid="], capture_output=True, text=True).stdout
    table = [tuple(map(int, line.split())) for line in listed.splitlines()]
    tree = [pid]
    for each in tree:
        tree += [child for child, parent, _ in table if parent == each and child not in tree]
    return tree + [child for child, _, session in table if session == pid and child not in tree]


def _trains(tree: list[int]) -> list[int]:
    """Return the process that trains: the one with the most memory, but for the agent."""
    sizes = {}
    for pid in tree[1:]:
        with contextlib.suppress(OSError):
            sizes[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return [max(sizes, key=sizes.__getitem__)] if sizes else []


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
