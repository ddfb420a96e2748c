"""Nodes of an elastic run on one machine: an agent of torchrun each, with its keeper and ranks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.cells.commands import OUTER, TRAIN
from run_files import read_metrics
from torch.distributed import TCPStore  # type: ignore[attr-defined]

TINY = (
    *("model=gpt-lite", "model.num_layers=1", "model.d_model=32", "model.num_heads=2", "data=synthetic"),
    *("data.sequence_length=32", "data.global_batch_size=8", "data.vocab_size=64", "precision=fp32", "run.name=x"),
    *("trainer.log_interval=1", "trainer.eval_interval=0", "trainer.gc_freq=0"),
)
CONF = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5,join_timeout=120,is_host=0"
PATIENCE = 150.0


class Nodes:
    """Agents that meet at a store of this process, which doesn't fail. `end` kills what is left, of these alone."""

    def __init__(self, folder: Path, *overrides: str, ranks: int = 1) -> None:
        self.folder, self.run, self._ranks = folder, folder / "run", ranks
        self.overrides = [*TINY, "parallelism.elastic=true", f"run.dir={self.run}", *overrides]
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.agents: dict[int, subprocess.Popen] = {}
        self.seen: set[int] = set()

    def start(self, number: int, nodes: str = "1:2") -> None:
        temporary = self.folder / f"tmp-{number}"
        temporary.mkdir(exist_ok=True)
        clean = {key: text for key, text in os.environ.items() if key not in OUTER and not key.startswith("SLURM_")}
        words = [
            *("-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={self._ranks}"),
            *("--max-restarts=20", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._store.port}"),
            *("--rdzv-id=x", "--local-addr=127.0.0.1", "--monitor-interval=0.1", f"--rdzv-conf={CONF}"),
        ]
        with (self.folder / f"log-{number}").open("ab") as log:
            self.agents[number] = subprocess.Popen(
                [sys.executable, *words, TRAIN, *self.overrides],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                start_new_session=True,
                env={
                    **clean,
                    **{"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                },
            )

    def workers(self, number: int) -> list[int]:
        return children(self.agents[number].pid)

    def keepers(self, number: int) -> list[int]:
        end = f"\0{self.agents[number].pid}\0".encode()
        forks = [pid for pid, words in commands() if b"import keep; keep" in words and words.endswith(end)]
        return [pid for pid in forks if parent(pid) not in forks]  # ranks have its command line

    def keeper(self, number: int) -> int | None:
        return next(iter(self.keepers(number)), None)

    def ranks(self, number: int) -> list[int]:
        keeper = self.keeper(number)
        return sorted(children(keeper)) if keeper else []

    def processes(self, number: int) -> list[int]:
        agent, keeper = self.agents[number].pid, self.keeper(number)
        found = [agent, *self.workers(number), *([keeper] if keeper else []), *self.ranks(number)]
        self.seen.update(found)
        return found

    def losses(self) -> dict[int, float]:
        try:
            return {row["step"]: row["loss"] for row in read_metrics(self.run) if "loss" in row}
        except (OSError, ValueError):  # not yet, or replaced at this moment
            return {}

    def restarts(self) -> list[dict[str, Any]]:
        path = self.run / "restarts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def steps(self, count: int) -> None:
        """Wait for so many more steps."""
        before = max(self.losses(), default=0)
        self.wait(lambda: max(self.losses(), default=0) >= before + count)

    def training(self, ranks: int) -> None:
        """Wait for steps of a world with so many ranks."""
        words = f"{ranks} ranks on CPU" if ranks > 1 else "1 thread,"
        self.wait(lambda: (self.run / "train.log").exists() and words in (self.run / "train.log").read_text())
        self.steps(3)

    def restarted(self, action: Callable[[], object]) -> dict[str, Any]:
        """Act, and wait for the first step of the next world. Return its row."""
        before = len(self.restarts())
        for number in self.agents:
            self.processes(number)
        action()
        self.wait(lambda: len(self.restarts()) > before)
        return self.restarts()[-1]

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("log-*")))

    def stop(self) -> None:
        """End the run by SIGTERM to each agent; nothing is left afterwards."""
        for number in self.agents:
            self.processes(number)
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            agent.wait(60)
        self.nothing_left()

    def nothing_left(self) -> None:
        self.wait(lambda: not self.seen.intersection(pid for pid, _ in commands()))
        assert list(self.folder.glob("tmp-*/gptlite-*")) == []

    def end(self) -> None:
        for number, agent in self.agents.items():
            for pid in self.processes(number) if agent.poll() is None else self.ranks(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()


def commands() -> list[tuple[int, bytes]]:
    """Return the process ids and command lines of what runs; zombies have none."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and (words := (path / "cmdline").read_bytes()):
                found.append((int(path.name), words))
    return found


def children(process: int) -> list[int]:
    return [pid for pid, _ in commands() if parent(pid) == process]


def parent(process: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return -1
