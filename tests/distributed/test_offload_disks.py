"""State files on disks that are full, cannot be written, or fail; and kills amid a write: the last checkpoint resumes.

The disks are real: small or read-only mounts in a namespace of the tests' own, which an ordinary user may have, too.
Where a machine forbids even that, the kernel's limit on the size of files stands for the full disk.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from checkpoint.destruction import disks
from checkpoint.destruction.campaign import LIVE, Lives, differing
from checkpoint.destruction.forks import ForkServer
from checkpoint.destruction.lives import TINY
from marking import marked

CASES, DISKS = "distributed.cells.offload_disks:", "checkpoint.destruction.disks:"
P = "parallelism."
LAYOUTS = {1: [f"{P}data=1", f"{P}zero=3"], 2: [f"{P}data=2", f"{P}zero=2"]}
INFINITE = f"{P}offload_parameters=true"
FULL_MB = 0.25  # less than the state of TINY takes
LAST = "checkpoints/step-00000006"
needs_mounts = pytest.mark.skipif("not disks.allowed()", reason="no mounts in a namespace of one's own here")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(disks.PRIVATE if disks.allowed() else ()) as server:
        yield server


class Run(Lives):
    """A run in `folder` whose state is in files beside it, in `good` or `bad`."""

    def __init__(self, server: ForkServer, folder: Path, world: int) -> None:
        super().__init__(server, folder, world)
        self.more = list[str]()
        self.good, self.bad = folder / "good", folder / "bad"
        for each in (self.good, self.bad):
            each.mkdir()

    def overrides(self, steps: int, path: Path) -> list[str]:
        offload = [f"{P}offload=nvme", f"{P}offload_path={path}", f"{P}offload_buffer_mib=1"]
        saving = ["checkpoint.interval=1", "checkpoint.keep=2", f"run.dir={self.folder / 'run'}"]
        return [*TINY, *LAYOUTS[self.world], *offload, *saving, f"trainer.max_steps={steps}", *self.more]

    def train(self, steps: int, path: Path, function: str = LIVE, *act: object) -> list[int]:
        """Trains until a step and gives the ranks' exit codes; `act` is what happens to each of them."""
        return self.live(self.overrides(steps, path), *act, rank=None, function=function)

    def command(self, path: Path) -> int:
        """`python train.py` with its files in a folder: it starts its own ranks."""
        self.lives += 1
        return self.server.start(CASES + "command", self.overrides(6, path), output=self.output()).wait()

    def error(self) -> str:
        """The one line in which rank 0 said what was wrong."""
        (line,) = [line for line in self.said().splitlines() if line.startswith("error: ")]
        assert "Traceback" not in self.said()
        return line


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """The folder of a run of so many ranks and steps that met no trouble."""

    @cache
    def of(world: int, steps: int) -> Path:
        run = Run(server, tmp_path_factory.mktemp("undisturbed"), world)
        assert run.train(steps, run.good) == [0] * world, run.said()
        return run.folder / "run"

    return of


@pytest.fixture
def begun(server: ForkServer, undisturbed: Callable[[int, int], Path], tmp_path: Path) -> Callable[[int], Run]:
    """A run that has saved two steps, a copy of the same one for each test."""

    def of(world: int) -> Run:
        run = Run(server, tmp_path, world)
        shutil.copytree(undisturbed(world, 2), tmp_path / "run")
        return run

    return of


@pytest.fixture
def check_goes_on(undisturbed: Callable[[int, int], Path]) -> Callable[[Run], None]:
    """Sees that on a good disk the same command finishes, from its last checkpoint, as a run without trouble does."""

    def check(run: Run) -> None:
        assert run.train(6, run.good) == [0] * run.world, run.said()
        assert f"resuming from {run.folder / 'run' / 'checkpoints' / 'step-'}" in run.said()
        assert differing(run.folder / "run" / LAST, undisturbed(run.world, 6) / LAST) == []
        assert list(run.good.iterdir()) == []

    return check


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_is_refused_before_any_rank_starts(server: ForkServer, begun, check_goes_on, world: int):
    run = begun(world)
    server.call(DISKS + "mount_small", str(run.bad), FULL_MB)
    assert run.command(run.bad) == 2
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    begin = f"error: parallelism.offload_path={run.bad}: the optimizer state of {ranks} takes 0."
    assert run.error().startswith(begin)
    assert run.error().endswith(" MB, but only 0.3 MB are free; free some, or give another folder")
    check_goes_on(run)


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_disk_that_fills_after_it_was_looked_at_is_refused_in_one_line(
    server: ForkServer, begun, check_goes_on, world: int
):
    """Here nobody looks: the ranks make their files at once. One has room for its own, two have not."""
    run = begun(world)
    server.call(DISKS + "mount_small", str(run.bad), FULL_MB)
    assert run.train(6, run.bad) == [2] * world
    words = "cannot keep its optimizer state there: no space left on device; free some space, or give another folder"
    assert run.error().startswith(f"error: parallelism.offload_path={run.bad}: rank ")
    assert run.error().endswith(words)
    check_goes_on(run)


@needs_mounts
@pytest.mark.slow
def test_a_disk_that_others_fill_later_does_not_touch_the_file(server: ForkServer, begun, undisturbed):
    """Its blocks are its own from the beginning."""
    run = begun(1)
    server.call(DISKS + "mount_small", str(run.bad), 2)
    assert run.train(6, run.bad, LIVE, "step", 0, f"fill:0:{run.bad / 'ballast'}") == [0], run.said()
    assert differing(run.folder / "run" / LAST, undisturbed(1, 6) / LAST) == []
    server.call(DISKS + "remove", str(run.bad / "ballast"))  # fails if nobody has filled it


@pytest.mark.slow
def test_a_file_that_is_refused_its_size_is_an_error_in_one_line(server: ForkServer, begun, check_goes_on):
    run = begun(1)
    assert run.train(6, run.good, CASES + "limited") == [2]
    assert "rank 0 cannot keep its optimizer state there: file too large; " in run.error()
    check_goes_on(run)


def test_a_disk_that_cannot_be_written_is_refused_before_any_rank_starts(server: ForkServer, begun, check_goes_on):
    run = begun(1)
    if disks.allowed():
        server.call(DISKS + "mount_read_only", str(run.good), str(run.bad))
        why = "read-only file system"
    elif os.geteuid():
        run.bad.chmod(0o555)
        why = "permission denied"
    else:
        pytest.skip("no mounts here, and permission bits do not stop root")
    assert run.command(run.bad) == 2
    words = f"{run.bad}: {why}; give another parallelism.offload_path"
    assert run.error() == f"error: parallelism.offload_path={run.bad}: {words}"
    check_goes_on(run)


@pytest.mark.parametrize(("world", "at"), marked([(1, 5), (1, 8), (2, 9)], slow=3))
def test_a_kill_amid_a_write_leaves_nothing_and_the_last_checkpoint_resumes(begun, check_goes_on, world: int, at: int):
    run = begun(world)
    codes = run.train(6, run.good, CASES + "disturbed", "kill", at)
    assert codes == [-signal.SIGKILL] * world
    assert list(run.good.iterdir()) == []
    check_goes_on(run)


@pytest.mark.parametrize("world", marked([1, 2], slow=1))
def test_parameters_in_files_meet_the_same_troubles(begun, check_goes_on, world: int):
    """A kill amid the write of a gradient or of a chunk; then a disk that refuses; the run goes on without the key."""
    run = begun(world)
    run.more = [INFINITE, f"{P}zero=3"]
    assert run.train(6, run.good, CASES + "disturbed", "kill", 19) == [-signal.SIGKILL] * world
    assert list(run.good.iterdir()) == []
    assert run.train(6, run.good, CASES + "disturbed", "refuse", 12) == [1] * world
    said = run.error() if world == 1 else run.said()  # one of several ranks ends with a traceback, for the launcher
    assert "in parallelism.offload_path cannot be read or written: File too large" in said
    assert run.train(6, run.good, CASES + "limited") == [2] * world
    assert " cannot keep its model there: file too large; " in run.error()
    assert run.train(5, run.good) == [0] * world, run.said()
    run.more = [f"{P}offload_parameters=false"]  # a run that goes on has the keys that it had
    check_goes_on(run)


@pytest.mark.parametrize("at", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_a_disk_that_fails_later_ends_the_run_and_the_last_checkpoint_resumes(begun, check_goes_on, at: int):
    """What the kernel refuses is beyond the limit on the size of files; a broken disk answers otherwise, no later."""
    run = begun(1)
    assert run.train(6, run.good, CASES + "disturbed", "refuse", at) == [1]
    words = "the model state in parallelism.offload_path cannot be read or written: File too large"
    assert run.error() == f"error: {words}; once that is fixed, the same command resumes from the last checkpoint"
    check_goes_on(run)
