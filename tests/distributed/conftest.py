"""Ranks that a file's tests share, and commands that start ranks."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed.cells.commands import RANK, Run, Start, losses
from distributed.cells.compare import Pool, References
from distributed.cells.run import GrowingRanks, Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], Ranks]]:
    """Ranks of a world, started once."""
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        return started.setdefault(world, Ranks(world))

    yield of
    for each in started.values():
        each.close()


@pytest.fixture(scope="module")
def growing() -> Iterator[GrowingRanks]:
    ranks = GrowingRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(References(tmp_path_factory.mktemp("references")))
    yield pool
    pool.close()


@pytest.fixture
def start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a command in tmp_path; whatever happens, it is ended with the test."""
    runs: list[Run] = []
    temporary = tmp_path_factory.mktemp("temporary")

    def run(*command: str, env: dict[str, str] | None = None, **options: int) -> Run:
        env = {"TMPDIR": str(temporary)} | (env or {})
        runs.append(Run([sys.executable, *command], tmp_path, env, **options))
        return runs[-1]

    yield run
    killed = [each.process.poll() in (None, -signal.SIGKILL) for each in runs]
    for each in runs:
        each.kill()
    if not any(killed):
        left = [path for path in temporary.iterdir() if path.name.startswith("gptlite-")]
        assert left == []


@pytest.fixture
def ranks(start: Start, tmp_path: Path) -> Start:
    """Starts two ranks with a behaviour of launch_rank.py, which train in tmp_path / "run"."""

    def run(behaviour: str, *overrides: str, **options: int) -> Run:
        common = ["data=synthetic", f"run.dir={tmp_path / 'run'}", "run.name=x", "trainer.max_steps=1000"]
        return start(RANK, behaviour, *common, *overrides, **options)

    return run


@pytest.fixture
def whole(run: Callable, tmp_path: Path) -> Callable[..., dict[int, float]]:
    """The losses of the tiny run in this process."""

    def train(*overrides: str) -> dict[int, float]:
        assert run("whole", *overrides)[0] == 0
        return losses(tmp_path / "whole")

    return train
