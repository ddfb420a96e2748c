"""One run of a campaign: nodes train, are lost and come back. There is a row for each loss, and one for the run."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from .check import BANNER, Curve, Row, doubled, missing, order, source, step_rows, wrong
from .draw import Loss, Plan
from .nodes import ROOT, Network, Node, network, settled

LIMIT = 60  # seconds without a step, after which the run hangs
FIRST = 600  # the same before the first step: all nodes import torch on the same few cores
UNNOTICED = 15  # seconds for which the loss of a spare node, which no rank notices, lasts; agents drop it after 3
TAIL = 150  # steps at the end without a loss
NOTICED = re.compile(r"[WEI](\d{4} \d\d:\d\d:\d\d\.\d+) .*(will restart worker group|failed \(exitcode|lost)")


class Hang(Exception):
    """No step for too long."""


class Over(Exception):
    """The run is near its last step, and has no room for another loss."""


@dataclass
class Trial:
    """A running plan."""

    plan: Plan
    folder: Path
    net: Network
    curve: Curve
    rows: list[Row] = field(default_factory=list)  # rows of steps, "at" a time, of a "start" of the run
    log: str = ""
    away: set[int] = field(default_factory=set)  # nodes that are meant to be out
    more: tuple[str, ...] = ()  # overrides
    restarts: int = 0  # agents that ended on their own, and were started again
    position: int = 0  # bytes of metrics.jsonl that have been read

    @property
    def starts(self) -> int:
        return self.log.count(BANNER)

    @property
    def world(self) -> int:
        """Ranks of the newest start, by its banner; 0 before the first."""
        begun = self.log.rfind(BANNER)
        layout = re.search(r"layout +(\d+) ranks", self.log[max(begun, 0) :])
        return 0 if begun < 0 else int(layout[1]) if layout else 1

    @property
    def full(self) -> int:
        """Ranks that train if all nodes are there. A tensor axis over two nodes leaves out an odd one."""
        ranks = self.plan.nodes * self.plan.layout.ranks
        return ranks - ranks % self.plan.layout.multiple

    @property
    def over(self) -> bool:
        return bool(self.rows) and self.rows[-1]["step"] >= self.plan.steps

    def join(self, node: Node) -> None:
        """Start a node's agent."""
        command = [*self.plan.layout.command(str(self.folder / "run"), self.plan.steps), *self.more]
        self.net.start(node, command, self.plan.layout.ranks)

    def look(self) -> None:
        """Read what the run has written, and start agents that have ended on their own, as a service manager does."""
        metrics, log = self.folder / "run/metrics.jsonl", self.folder / "run/train.log"
        fresh: list[Row] = []
        with contextlib.suppress(FileNotFoundError), open(metrics, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.position:
                self.position = 0  # a restart has removed the rows that it will write again
            file.seek(self.position)
            text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self.position += len(text)
            fresh, _ = step_rows(text.decode(errors="replace"))
        with contextlib.suppress(FileNotFoundError):
            self.log = log.read_text(errors="replace")
        # A start's rows come long after its banner, and the log was read after the rows.
        for row in fresh:
            at = datetime.fromisoformat(row["time"]).timestamp()
            if not self.rows or at > self.rows[-1]["at"]:
                self.rows.append(row | {"at": at, "start": self.starts})
        for node in self.net.nodes:
            if node.agent and node.agent.poll() is not None and node.number not in self.away and not self.over:
                self.restarts += 1
                self.join(node)

    def wait(self, done: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
        """Wait until `done()`. Raises Hang if no step is trained for `limit` seconds, and Over near the end."""
        count, since = len(self.rows), time.monotonic()
        while self.look() or not done():
            if len(self.rows) > count:
                count, since = len(self.rows), time.monotonic()
            if time.monotonic() - since > limit:
                raise Hang(f"no step for {limit:g} s before {what}")
            if self.restarts > 10 * len(self.net.nodes):
                raise Hang(f"{self.restarts} agents have ended on their own before {what}; read {self.folder}/*.err")
            if self.over:
                raise Over(f"the last step came before {what}")
            time.sleep(0.01)

    def trained(self, start: int) -> list[Row]:
        """Return the rows of starts after `start`."""
        return [row for row in self.rows if row["start"] > start]

    def lose(self, loss: Loss, row: Row) -> None:
        """Bring about a loss, wait for the next step and then for all nodes. Writes the outcome into `row`."""
        self.wait(lambda: self.world >= self.full, "a full world", LIMIT if self.rows else FIRST)
        begun, restarts = len(self.rows), self.restarts
        self.wait(lambda: len(self.rows) >= begun + loss.steps, "a loss", LIMIT if self.rows else FIRST)
        if self.rows[-1]["step"] > self.plan.steps - TAIL:
            raise Over
        self._moment(loss)
        before, start, at = len(self.rows), self.starts, time.time()
        row |= {"step": self.rows[-1]["step"], "ok": False}
        self._take(loss, 0)
        if loss.kind in ("two", "restore"):
            time.sleep(loss.second if loss.kind == "restore" else 0)
            self.look()
            start, at = self.starts, time.time()
            self._take(loss, 1)
        rank = "rank" in loss.ways[: 1 + (loss.kind in ("two", "restore"))]  # its agent restarts the world
        self.wait(lambda: bool(self.trained(start)) or (not rank and self._stepped(at + 1)), "the next step")
        if self.trained(start):
            self._judge_restart(row, start, at)
        else:
            row |= {"repeated": 0, "from": "nothing"}  # only a spare node is lost
            self.wait(lambda: self._stepped(at + UNNOTICED), "steps without a spare node")
        with contextlib.suppress(Over):  # the last step came before a node was back: judged by what there is
            self._come_back(loss, row, start, at)
        most = max(row["step"] for row in self.rows[:before])
        reasons = wrong(self.rows[before:], self.curve, self.plan.layout.tolerance, most)
        reasons += doubled(self.rows[before - 1 :])
        reasons += [row["left"]] if row.get("left") else []
        row |= {"ok": not reasons, "reason": "; ".join(reasons[:3]), "restarts": self.restarts - restarts}

    def _stepped(self, at: float) -> bool:
        """Return True if there is a step after a time. Where a rank that trains has lost a peer, there is no step."""
        return bool(self.rows) and self.rows[-1]["at"] > at

    def _come_back(self, loss: Loss, row: Row, start: int, at: float) -> None:
        """Bring lost nodes back, and wait until all train. Writes the longest pause into `row`."""
        if (lost := self._away(loss)) or loss.kind == "rejoin":
            start = self.starts
            self._return(lost, row)
            if loss.kind == "rejoin":
                time.sleep(loss.second)
                self.look()
                start, at = self.starts, time.time()
                self._take(loss, 1)
            spare, until = row["from"] == "nothing", time.time() + UNNOTICED
            self.wait(
                lambda: (self.world >= self.full and bool(self.trained(start))) or (spare and self._stepped(until)),
                "the return of a node",
            )
            if not self.trained(start):
                return
            first = self.trained(start)[0]
            row["back"] = round(first["at"] - max(r["at"] for r in self.rows if r["start"] < first["start"]), 2)
            if loss.kind == "rejoin":
                self._judge_restart(row, start, at)
        count = len(self.rows)
        self.wait(lambda: len(self.rows) >= count + 3, "three steps")

    def _judge_restart(self, row: Row, start: int, at: float) -> None:
        first = self.trained(start)[0]
        last = max(r["step"] for r in self.rows if r["start"] <= start)
        noticed = [when - at for node in self.net.nodes if node.number not in self.away for when in _noticed(node, at)]
        row |= {
            "detected": round(min(noticed), 2) if noticed else None,
            "seconds": round(first["at"] - at, 2),
            "repeated": max(0, last + 1 - first["step"]),
            "from": source(self.log, first["start"]),
        }

    def _moment(self, loss: Loss) -> None:
        """Wait for the moment of a loss."""
        folder = self.folder / "run/checkpoints"
        if loss.kind == "save":
            known = set(folder.glob("*")) if folder.exists() else set()
            self.wait(lambda: folder.exists() and bool(set(folder.glob("*")) - known), "a save")
        elif loss.kind == "memory_save":
            interval = self.plan.layout.memory_interval
            count = len(self.rows)
            self.wait(lambda: any(r["step"] % interval == 0 for r in self.rows[count:]), "a save in memory")
        time.sleep(loss.delay)
        self.look()

    def _take(self, loss: Loss, number: int) -> None:
        """Lose a node, or a process on it."""
        node, way = self.net.nodes[loss.nodes[number]], loss.ways[number]
        ranks = node.ranks()
        if way == "rank" and ranks:
            node.kill([ranks[int(loss.choice * len(ranks))]])
            return
        if way == "rank":  # there is none yet: the agent, which is started again at once
            assert node.agent is not None
            node.kill([node.agent.pid])
            return
        self.away.add(node.number)
        if way == "agent":
            assert node.agent is not None
            node.kill([node.agent.pid])
        elif way == "cable":
            self.net.cable(node, False)
        else:
            node.send(signal.SIGSTOP)

    def _away(self, loss: Loss) -> list[tuple[Node, str]]:
        count = 1 if loss.kind == "rejoin" else 2  # the second one, perhaps of the same node, is yet to come
        pairs = [(self.net.nodes[number], way) for number, way in zip(loss.nodes[:count], loss.ways, strict=False)]
        return [(node, way) for node, way in pairs if node.number in self.away]

    def _return(self, lost: list[tuple[Node, str]], row: Row) -> None:
        """Bring nodes back."""
        for node, way in lost:
            if way == "cable":
                self.net.cable(node, True)
            elif way == "frozen":
                node.send(signal.SIGCONT)
            elif left := node.pids():
                row["left"] = f"processes {left} outlived the agent of node {node.number}"
                node.kill(left)
            self.away.discard(node.number)  # an ended agent is started again by `look`

    def finish(self) -> list[str]:
        """Wait for the end, and return what is wrong with the whole run."""
        with contextlib.suppress(Over):
            self.wait(lambda: self.over, "the last step")
        for number in self.away:
            self.net.nodes[number].kill(self.net.nodes[number].pids())
        deadline = time.monotonic() + LIMIT
        while any(node.agent and node.agent.poll() is None for node in self.net.nodes):
            if time.monotonic() > deadline:
                return [f"agents still run {LIMIT} s after the last step"]
            time.sleep(0.1)
        found = [
            f"the agent of node {node.number} exits with {node.agent.returncode}"
            for node in self.net.nodes
            if node.agent and node.agent.returncode and node.number not in self.away
        ]
        found += settled(self.net, 10)
        left, torn = step_rows((self.folder / "run/metrics.jsonl").read_text())
        found += [f"{torn} torn rows in metrics.jsonl"] if torn else []
        found += missing(left, self.plan.steps) + wrong(left, self.curve, self.plan.layout.tolerance)[:3]
        found += doubled([row | {"start": 1} for row in left])[:3]
        found += wrong(self.rows, self.curve, self.plan.layout.tolerance)[:3] + doubled(self.rows)[:3]
        found += order(self.folder / "run", self.folder.parent / self.plan.whole)
        return found + damaged(self.folder / "run/checkpoints")


def damaged(folder: Path) -> list[str]:
    """Return the checkpoints of a folder that are not intact."""
    found = []
    for path in sorted(folder.glob("step-*")):
        words = [sys.executable, "-m", "gptlite.satellites.checkpoint_tool.command", "verify", str(path)]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            found.append(f"{path.name}: {(ended.stderr or ended.stdout).strip()[-200:]}")
    return found


def whole(plan: Plan, out: Path) -> Curve:
    """Return the curve of the uninterrupted run in one process, which is trained once for all runs of its kind."""
    folder = out / plan.whole
    if not (folder / "result.json").exists():  # a run that was interrupted goes on
        words = [sys.executable, "train.py", *plan.layout.alone(str(folder), plan.steps)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    if missed := missing(step_rows((folder / "metrics.jsonl").read_text())[0], plan.steps):
        raise OSError(f"{folder}: {missed[0]}; remove the folder")
    return Curve.read(folder)


def run(plan: Plan, out: Path, write: Callable[[Row], None], more: tuple[str, ...] = ()) -> Row:
    """Run a plan, with `more` overrides. Calls `write` with the row of each loss, and returns the row of the run."""
    curve, folder = whole(plan, out), out / f"run-{plan.seed}-{plan.number}"
    folder.mkdir(parents=True)
    name = {"seed": plan.seed, "run": plan.number, "layout": plan.layout.name, "nodes": plan.nodes}
    count, reasons = 0, list[str]()
    began = time.monotonic()
    with network(plan.nodes, folder) as net:
        trial = Trial(plan, folder, net, curve, more=more)
        for node in net.nodes:
            trial.join(node)
        try:
            with contextlib.suppress(Over):
                for loss in plan.losses:
                    row: Row = name | {"kind": loss.kind, "ways": list(loss.ways), "lost": list(loss.nodes)}
                    try:
                        trial.lose(loss, row)
                    except Hang as error:
                        if "step" in row:
                            write(row | {"reason": str(error)})
                        raise
                    write(row)
                    count += 1
            reasons = trial.finish()
        except Hang as error:
            reasons = [str(error)]
        result: dict[str, Any] = name | {"losses": count, "steps": len(trial.rows), "starts": trial.starts}
        result |= {"wall": round(time.monotonic() - began, 1), "restarts": trial.restarts}
    return result | {"ok": not reasons, "reason": "; ".join(reasons[:5])}


def _noticed(node: Node, at: float) -> list[float]:
    """Return the times after `at` at which a node's agent wrote of a loss."""
    year = datetime.now().year
    texts = NOTICED.findall(node.errors.read_text(errors="replace") if node.errors.exists() else "")
    times = [datetime.strptime(f"{year}{text}", "%Y%m%d %H:%M:%S.%f").timestamp() for text, _ in texts]
    return [when for when in times if when > at]
