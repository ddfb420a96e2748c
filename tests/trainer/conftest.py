"""A short run that tests begin from, and a run's banner."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gptlite.config import load
from gptlite.parallelism.mesh import build_mesh
from gptlite.trainer.attached import NOTHING
from gptlite.trainer.banner import announce
from gptlite.trainer.build import build_run
from gptlite.trainer.folder import RunFolder


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are kept from one test to the next."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def text(text: Path, kept: Path) -> Path:
    """The text in the same place in each test, as a run resumes only with the path that it began with."""
    return shutil.copyfile(text, kept / text.name)


@pytest.fixture
def tiny(tiny: list[str]) -> list[str]:
    """With one layer: half of the tensors that are stepped and saved."""
    return [*tiny, "model.num_layers=1"]


@pytest.fixture
def begun(run: Callable, tmp_path: Path, kept: Path) -> Path:
    """The folder of the tiny run `a` after 2 steps, under tmp_path: a copy, for all tests but the first."""
    folder = tmp_path / "a"
    if (kept / "a").exists():
        return shutil.copytree(kept / "a", folder)
    assert run("a", "trainer.max_steps=2")[0] == 0
    shutil.copytree(folder, kept / "a")
    return folder


@pytest.fixture
def banner(tiny: list[str], tmp_path: Path) -> Callable[..., str]:
    """What the tiny run, with further overrides, announces before its first step, in one line."""

    def announced(name: str, *overrides: str) -> str:
        config = load([*tiny, f"run.dir={tmp_path / name}", f"run.name={name}", *overrides])
        mesh = build_mesh(config.parallelism)
        folder = RunFolder(config, mesh)
        run = build_run(config, mesh, folder.log)
        with folder.opened(run.config, run.data.tokenizer), closing(run.state.loader):
            announce(run, folder, NOTHING).close()
        return " ".join((tmp_path / name / "train.log").read_text().split())  # the banner wraps

    return announced
