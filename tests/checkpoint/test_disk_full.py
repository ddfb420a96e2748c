"""A full disk, a read-only one, and a folder that was moved: what was saved stays, and words say what to do."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint.destruction import disks
from checkpoint.destruction.campaign import Lives, differing
from checkpoint.destruction.forks import ForkServer
from checkpoint.destruction.lives import TINY
from marking import combinations, marked

DISKS = "checkpoint.destruction.disks"
MODES = {"sync": "checkpoint.async_save=false", "async": "checkpoint.async_save=true"}
DISK_MB, LIMIT = 12, 60.0  # seconds for every rank to end
LAYOUTS = {1: [], 2: ["parallelism.data=2", "parallelism.zero=2"], 4: ["parallelism.data=2", "parallelism.tensor=2"]}
needs_mounts = pytest.mark.skipif("not disks.allowed()", reason="no mounts in a namespace of one's own here")
pytestmark = needs_mounts


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(disks.PRIVATE) as server:
        yield server


class Disk(Lives):
    """A small disk with a run that has saved two steps."""

    def __init__(self, server: ForkServer, folder: Path, world: int, mode: str) -> None:
        super().__init__(server, folder, world)
        self.disk = folder / "disk"
        self.disk.mkdir()
        server.call(f"{DISKS}:mount_small", str(self.disk), DISK_MB)
        self.run, self.ballast = self.disk / "run", self.disk / "ballast"
        self.overrides = [*TINY, *LAYOUTS[world], MODES[mode], "checkpoint.interval=1", "checkpoint.keep=2"]
        assert self.train(2) == [0] * world, self.said()

    def train(self, steps: int, *act: object, run: Path | None = None) -> list[int]:
        """Trains until a step. What happens meanwhile is by the last rank where it is amid the data, else by rank 0."""
        actor = self.world - 1 if act[:1] == ("data",) else 0
        overrides = [*self.overrides, f"run.dir={run or self.run}", f"trainer.max_steps={steps}"]
        began = time.monotonic()
        codes = self.live(overrides, *act, rank=actor)
        assert time.monotonic() - began < LIMIT
        return codes

    def fill(self, left: int = 0) -> str:
        """What to do to a run: take all space but so many bytes."""
        return f"fill:{left}:{self.ballast}"

    def look(self) -> dict:
        return self.server.call(f"{DISKS}:look", str(self.run))

    def check_goes_on(self, steps: int) -> None:
        """With space again the same command finishes, with the numbers of an undisturbed run."""
        self.server.call(f"{DISKS}:remove", str(self.ballast))
        assert self.train(steps) == [0] * self.world, self.said()
        assert self.look() == {"steps": [steps, steps - 1], "hidden": []}
        assert self.train(steps, run=self.folder / "whole") == [0] * self.world, self.said()
        self.server.call(f"{DISKS}:copy", str(self.run), str(self.folder / "copy"))
        step = f"checkpoints/step-{steps:08d}"
        assert differing(self.folder / "copy" / step, self.folder / "whole" / step) == []


def check_refusal(disk: Disk, words: str) -> None:
    """Rank 0 says in one line what happened, and no rank shows a traceback."""
    lines = [line for line in disk.said().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, disk.said()[-3000:]
    assert not any("Traceback" in disk.said(rank) for rank in range(disk.world))
    assert re.search(words, lines[0]), lines[0]
    assert str(disk.run) in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_too_little_space_for_the_next_one(server, tmp_path, mode):
    disk = Disk(server, tmp_path, 1, mode)
    # Some for the metrics and the log, and less than a checkpoint takes.
    assert disk.train(6, "step", 0, disk.fill(200_000)) == [1]
    check_refusal(disk, r"a checkpoint takes \d.\d MB, but only 0.\d MB are free")
    assert disk.look() == {"steps": [2, 1], "hidden": []}
    assert disk.train(6) == [2], "refused before it trains"
    check_refusal(disk, r"a checkpoint takes \d.\d MB, but only 0.\d MB are free")
    disk.check_goes_on(6)


@pytest.mark.parametrize(
    ("mode", "stage", "index"),
    marked(
        [("async", "manifest", 0), ("sync", "data", 3)]
        + [
            (mode, stage, index)
            for stage, index in (("before rename", 0), ("data", 5), ("retention", 0), ("before data", 0), ("data", 0),
                                 ("after data", 1), ("manifest", 1), ("after rename", 0))
            for mode in MODES
        ],
        quick=1,
        slow=6,
    ),
)  # fmt: skip
def test_the_disk_fills_amid_a_save(server, tmp_path, mode, stage, index):
    disk = Disk(server, tmp_path, 1, mode)
    (code,) = disk.train(6, stage, index, disk.fill())
    # Where nothing more is to be written for this one, the next one fails.
    assert code == 1, disk.said()
    check_refusal(disk, "No space left on device|MB are free")
    left = disk.look()
    assert left["hidden"] == []
    assert left["steps"][0] in (2, 3)
    disk.check_goes_on(6)


@pytest.mark.parametrize(
    ("world", "mode", "stage"),
    marked(
        combinations((2, 4), MODES, ("step", "data", "manifest"), first=[(2, "async", "data"), (4, "sync", "step")]),
        slow=2,
    ),
)
def test_every_rank_learns_of_a_full_disk(server, tmp_path, world, mode, stage):
    disk = Disk(server, tmp_path, world, mode)
    assert disk.train(6, stage, 0, disk.fill(200_000 if stage == "step" else 0)) == [1] * world, disk.said()
    check_refusal(disk, "No space left on device|MB are free")
    left = disk.look()
    assert left["hidden"] == []
    assert left["steps"][0] == 2
    disk.check_goes_on(6)


@pytest.mark.slow
def test_what_cannot_be_written_can_be_read(server, tmp_path):
    lives = Lives(server, tmp_path)

    def live(*more: str) -> tuple[int, str]:
        (code,) = lives.live([*TINY, "checkpoint.interval=2", *more])
        return code, lives.said()

    assert live(f"run.dir={tmp_path / 'disk' / 'run'}", "trainer.max_steps=4")[0] == 0
    whole = tmp_path / "whole"
    assert live(f"run.dir={whole}", "trainer.max_steps=6")[0] == 0
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    server.call(f"{DISKS}:mount_read_only", str(tmp_path / "disk"), str(read_only))

    step = read_only / "run" / "checkpoints" / "step-00000004"
    for number, resume in enumerate((step, read_only / "run")):
        new = tmp_path / f"new-{number}"
        code, said = live(f"checkpoint.resume={resume}", f"run.dir={new}", "trainer.max_steps=6")
        assert code == 0, said
        assert f"resuming from {step}" in said
        assert differing(*(run / "checkpoints" / "step-00000006" for run in (new, whole))) == []
    for checkpoint in (step, read_only / "run"):
        assert server.start(f"{DISKS}:generate", str(checkpoint), output=tmp_path / "text").wait() == 0
        assert (tmp_path / "text").read_text().startswith("7"), (tmp_path / "text").read_text()
    for run in (read_only / "run", read_only / "new"):
        code, said = live(f"run.dir={run}", "trainer.max_steps=6")
        assert code == 2
        (line,) = said.splitlines()
        assert re.match(rf"error: run\.dir={run}: .*read-only file system; give another run\.dir$", line), line

    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(tmp_path / "disk" / "run", moved)
    shutil.rmtree(tmp_path / "disk" / "run")
    assert live(f"run.dir={moved}", "trainer.max_steps=6")[0] == 0
    assert differing(*(run / "checkpoints" / "step-00000006" for run in (moved, whole))) == []
