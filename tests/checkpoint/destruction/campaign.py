"""Lives of runs, and a run that is killed again and again, each life going on where the last one ended."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint.conftest import bits
from checkpoint.destruction.forks import Forked, ForkServer
from checkpoint.destruction.lives import TINY, read_journal
from checkpoint.destruction.points import STAGES

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import read_manifest, verify
from gptlite.checkpoint.store import step_folders, step_of

LIVE = "checkpoint.destruction.lives:live"
LEFTOVER = re.compile(r"\.(tmp|trash)-")


def quiet(_: str) -> None:
    """A log for nobody."""


class Lives:
    """Lives of runs on `world` ranks, with files in `folder` for what each rank of each life notes and prints."""

    def __init__(self, server: ForkServer, folder: Path, world: int = 1) -> None:
        self.server, self.folder, self.world, self.lives = server, folder, world, 0

    def begin(self, overrides: Sequence[str], *act: object, rank: int | None = 0, function: str = LIVE) -> list[Forked]:
        """Starts the ranks of a life. `act` is what happens to one of them, or to each (None)."""
        self.lives += 1
        env, store = {}, None
        if self.world > 1:
            # Held by this process, on a port the kernel chooses, until the next ranks start.
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
            env = {"WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.world), "MASTER_ADDR": "localhost"}
            # What torchrun says: the store is there already.
            env |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = []
        for each in range(self.world):
            arguments = [overrides, str(self.journal(each)), *(act if rank in (each, None) else ())]
            mine = env | {"RANK": str(each), "LOCAL_RANK": str(each)} if env else {}
            ranks.append(self.server.start(function, *arguments, output=self.output(each), env=mine))
        ranks[0].held = store
        return ranks

    def live(self, overrides: Sequence[str], *act: object, **options: Any) -> list[int]:
        """A life until its end: the exit codes of the ranks."""
        return [each.wait(120) for each in self.begin(overrides, *act, **options)]

    def journal(self, rank: int = 0) -> Path:
        """Where a rank of the last life has noted what it has reached."""
        return self.folder / f"journal-{self.lives}-{rank}"

    def said(self, rank: int = 0) -> str:
        """All that a rank of the last life has printed."""
        return self.output(rank).read_text(errors="replace")

    def output(self, rank: int = 0) -> Path:
        """Its file."""
        return self.folder / f"output-{self.lives}-{rank}"


class Campaign(Lives):
    """The run in `folder`, on `world` ranks. `lost` counts the steps that each kill has cost."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        overrides: Sequence[str],
        *,
        seed: int,
        interval: int,
        world: int = 1,
        base: Sequence[str] = TINY,
    ) -> None:
        super().__init__(server, folder, world)
        self.interval = interval
        self.run, self.random = folder / "run", random.Random(seed)
        self.overrides = [*base, *overrides, f"checkpoint.interval={interval}"]
        self.hits: Counter[str] = Counter()
        self.lost: list[int] = []
        self.committed = 0  # the newest step whose save has returned, in any life
        self.per_save: dict[str, int] = {}
        self.seconds = 0.0

    @property
    def in_flight(self) -> int:
        """Saves that may be lost beside the one interval: that which an asynchronous run has handed over."""
        return int("checkpoint.async_save=true" in self.overrides)

    def probe(self) -> None:
        """A whole life of four saves: how long it takes, and how many points a save has in each stage."""
        self.complete(f"trainer.max_steps={4 * self.interval}")
        lines = read_journal(self.journal())
        counts = dict(rest.rsplit(" ", 1) for word, rest, _ in lines if word == "count")
        self.per_save = {stage: max(1, int(counts.get(stage, 0)) // 4) for stage in (*STAGES, "step")}
        begun = [when for word, _, when in lines if word == "begin"]
        self.seconds = begun[-1] - lines[0][2]
        self.check()

    def kill_at(self, stage: str, rank: int = 0) -> None:
        """A life whose rank kills itself within its first saves, at a point of a stage."""
        index = self.random.randrange(2 * self.per_save[stage])
        ranks = self._begin([], stage, index, rank=rank)
        codes = [ranks[rank].wait()]
        for each in ranks:  # as a launcher does
            each.kill()
        codes += [each.wait() for each in ranks]
        assert codes[0] == -9, (stage, index, self._text())
        self.hits[stage] += sum(word == "hit" for word, _, _ in read_journal(self.journal(rank)))
        self.check()

    def kill_by_time(self) -> None:
        """A life that is killed at a random moment; with several ranks, one some milliseconds before the others."""
        ranks = self._begin([])
        self.random.shuffle(ranks)
        time.sleep(self.random.uniform(0, self.seconds))
        for each in ranks:
            each.kill()
            time.sleep(self.random.choice([0, 0.02]) if each is not ranks[-1] else 0)
        codes = [each.wait() for each in ranks]
        assert codes[0] == -9, self._text()
        assert set(codes) <= {-9, 1}, self._text()  # a rank that is left alone may be quicker to fail
        self.hits["time"] += 1
        self.check()

    def check(self) -> None:
        """Nothing is unloadable, and nothing lost but what may be."""
        lines = read_journal(self.journal())
        steps = {word: [int(rest) for each, rest, _ in lines if each == word] for word in ("step", "begin", "saved")}
        root = self.run / "checkpoints"
        folders = step_folders(root)
        for folder in folders:
            verify(folder, quiet)
        newest = step_of(folders[0]) or 0 if folders else 0
        if folders:
            config = CheckpointConfig(keep=2)
            assert Checkpointer(config, self.run).find("auto", quiet) == folders[0]
        returned = steps["saved"][: len(steps["saved"]) - self.in_flight]
        self.committed = max([self.committed, *returned])
        assert newest >= self.committed, f"step {newest} is the newest, but {self.committed} had been saved"
        if steps["step"]:
            self.lost.append(max(0, steps["step"][-1] - newest))
            assert self.lost[-1] <= self.interval * (1 + self.in_flight), f"{self.lost[-1]} steps lost"
        if returned:
            old = [name for name in self._before if (root / name).exists()]
            assert old == [], f"left by an earlier life, after a save: {old}"

    def finish(self) -> Path:
        """A last life that nothing kills; its last checkpoint."""
        held = step_folders(self.run / "checkpoints")
        steps = (step_of(held[0]) or 0 if held else 0) + 2 * self.interval
        self.complete(f"trainer.max_steps={steps}")
        self.check()
        left = [path.name for path in (self.run / "checkpoints").iterdir() if LEFTOVER.match(path.name)]
        assert left == []
        newest, *older = step_folders(self.run / "checkpoints")
        assert len(older) == 1, "checkpoint.keep is 2"
        return newest

    def differing(self) -> list[str]:
        """The tensors of the finished run that are not to the bit those of an undisturbed one."""
        last = self.finish()
        return differing(last, self.uninterrupted(step_of(last) or 0))

    def uninterrupted(self, steps: int) -> Path:
        """The checkpoint of a run of the same length that nothing has disturbed."""
        self.complete(f"run.dir={self.folder / 'whole'}", f"trainer.max_steps={steps}", "checkpoint.interval=0")
        return step_folders(self.folder / "whole" / "checkpoints")[0]

    def _begin(self, more: Sequence[str], *act: object, rank: int = 0) -> list[Forked]:
        root = self.run / "checkpoints"
        self._before = [p.name for p in root.iterdir() if LEFTOVER.match(p.name)] if root.is_dir() else []
        return self.begin([*self.overrides, f"run.dir={self.run}", *more], *act, rank=rank)

    def complete(self, *more: str) -> None:
        """A life that ends by itself."""
        assert [each.wait() for each in self._begin(more)] == [0] * self.world, self._text()

    def _text(self) -> str:
        return "\n".join(self.said(rank)[-2000:] for rank in range(self.world))


def stored(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Of all tensors of a checkpoint what they are, to the bit."""
    entries = read_manifest(folder).tensors
    into = {key: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for key, entry in entries.items()}
    load_tensors(folder, into, log=quiet)
    return {key: (tensor.dtype, tensor.shape, bits(tensor)) for key, tensor in into.items()}


def differing(first: Path, second: Path) -> list[str]:
    """The keys of two checkpoints whose tensors are not the same."""
    one, two = stored(first), stored(second)
    return [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
