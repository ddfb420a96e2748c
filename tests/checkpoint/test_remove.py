"""A checkpoint that cannot be deleted is named, and training goes on."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from gptlite.checkpoint import store
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which nothing can be deleted."""

    def rmtree(path, onerror):
        onerror(os.unlink, str(path), (OSError, OSError(errno.EBUSY, "Device or resource busy"), None))

    monkeypatch.setattr(shutil, "rmtree", rmtree)


@pytest.mark.usefixtures("stuck")
def test_what_cannot_be_deleted_is_said(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(OSError, match="cannot be removed wholly: Device or resource busy") as error:
        store.remove(tmp_path / "step-1")
    assert Path(error.value.filename).exists()
    assert not (tmp_path / "step-1").exists()


@pytest.mark.usefixtures("stuck")
def test_a_save_goes_on_and_says_what_stays(tmp_path: Path) -> None:
    said: list[str] = []
    checkpointer = Checkpointer(CheckpointConfig(keep=1), tmp_path)
    for step in (1, 2):
        checkpointer.save({"w": torch.ones(2)}, {"step": step}, "seed: 1\n", None, said.append)
    assert [path.name for path in store.step_folders(tmp_path / "checkpoints")] == ["step-00000002"]
    (line,) = [each for each in said if "removed wholly" in each]
    assert "Device or resource busy" in line
    assert ".trash-step-00000001" in line


def test_a_leftover_that_cannot_be_removed_is_named_and_stops_no_save(tmp_path, monkeypatch):
    root, lines = tmp_path / "checkpoints", []
    (root / ".tmp-latest-x").mkdir(parents=True)
    (root / ".tmp-latest-y").write_text("")

    def refused(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "unlink", refused)
    monkeypatch.setattr(os, "rmdir", refused)
    with store.writing(root, lines.append):
        pass
    failed = [line for line in lines if "cannot be removed wholly: " in line]
    assert len(failed) == 2
    assert all("Permission denied; change the permissions, or give another path" in line for line in failed)
