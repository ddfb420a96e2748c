"""A failure at any point of a save leaves the store as it was, nothing is overwritten, dead writers are cleaned up."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.conftest import FakeTokenizer, disk_full, failing_at
from run_files import snapshot

from gptlite.checkpoint import store
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.hashed_file import PIECE
from gptlite.checkpoint.parts import Parts


class Killed(BaseException):
    """Stands for whatever ends a process in the middle of a save."""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), Killed(), KeyboardInterrupt()])
def test_a_failure_at_any_sync_or_rename_before_the_commit_leaves_the_previous_one(save, checkpointer, error):
    previous = save(100)
    before = snapshot(checkpointer.root)
    with failing_at(os, "fsync", None, error) as calls:
        probe = save(101)
    store.remove(probe)
    (checkpointer.root / "latest").write_text(previous.name + "\n")
    after_commit = 3  # the parent of the new name; the file `latest` and its parent
    points = [("fsync", index) for index in range(len(calls) - after_commit)] + [("rename", 0), ("rename", 1)]
    assert len(points) > 8
    for name, index in points:
        with failing_at(os, name, index, error), pytest.raises(type(error)):
            save(200)
        assert snapshot(checkpointer.root) == before, (name, index)
        assert checkpointer.find("auto") == previous


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, tensors, monkeypatch, beside):
    """What a power cut would find out: killing a process leaves the page cache as it is."""
    checkpointer = Checkpointer(CheckpointConfig(async_save=beside), tmp_path)
    synced: dict[int, int] = {}  # inode -> time of its last change, when it was brought to the disk
    committed, fsync, rename = [], os.fsync, os.rename

    def seen_fsync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_mtime_ns

    def seen_rename(old, new):
        if Path(new).name.startswith("step-"):
            below = [Path(old), *Path(old).rglob("*")]
            committed.append([str(p) for p in below if synced.get(p.stat().st_ino) != p.stat().st_mtime_ns])
            assert len(below) == 10
        rename(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    checkpointer.save(tensors, {"step": 1}, "seed: 1\n", FakeTokenizer(), print)
    checkpointer.finish()
    assert committed == [[]]
    root = checkpointer.root
    assert synced[root.stat().st_ino] == root.stat().st_mtime_ns  # the new name itself, and that of `latest`


@pytest.mark.parametrize(("module", "name"), [(torch, "save"), (os, "pwrite")])
def test_a_full_disk_inside_torch_keeps_its_error_and_the_older_one_stays(
    save, checkpointer, tensors, monkeypatch, module, name
):
    tensors["large"] = torch.zeros(3 * PIECE // 4)  # so that it is amid torch's own writing
    checkpointer.config.keep = 1
    previous = save(100)
    monkeypatch.setattr(module, name, disk_full)
    with pytest.raises(OSError, match="No space left"):
        save(200)
    assert store.step_folders(checkpointer.root) == [previous]
    assert checkpointer.find("auto") == previous


def test_what_no_rank_writes_is_not_committed(save, checkpointer, monkeypatch):
    share = Parts.share

    def forget(parts, *args):
        share(parts, *args)
        parts.written.remove("half")

    monkeypatch.setattr(Parts, "share", forget)
    with pytest.raises(ValueError, match=r"checkpoint key half is not stored as bfloat16 \[33\]"):
        save(100)
    assert store.step_folders(checkpointer.root) == []


def test_a_failing_tokenizer_commits_nothing(checkpointer, tensors):
    broken = FakeTokenizer(RuntimeError("no vocabulary"))
    with pytest.raises(RuntimeError, match="no vocabulary"):
        checkpointer.save(tensors, {"step": 1}, "", broken, print)
    assert sorted(path.name for path in checkpointer.root.iterdir()) == [".lock"]


def test_a_step_that_exists_is_left_as_it_is(save, checkpointer, tensors):
    folder = save(100)
    before = snapshot(folder)
    tensors["ids"] += 1
    assert checkpointer.save(tensors, {"step": 100}, "other: 1\n", None, print) == folder
    assert snapshot(folder) == before


def test_a_damaged_step_is_kept_beside_the_one_that_takes_its_name(save, checkpointer):
    folder = save(100)
    (folder / "config.yaml").write_text("seed: 2\n")
    before = snapshot(folder)
    assert save(100) == checkpointer.find("auto")
    (aside,) = checkpointer.root.glob("damaged-*")
    assert snapshot(aside) == before


def test_an_existing_folder_is_never_replaced(tmp_path):
    final = tmp_path / "step-00000001"

    def save_while_another_commits() -> None:
        with store.staged(final) as folder:
            (folder / "new").write_text("new")
            final.mkdir()
            (final / "theirs").write_text("theirs")

    with pytest.raises(OSError, match="not empty"):
        save_while_another_commits()
    assert list(snapshot(tmp_path)) == ["step-00000001/theirs"]
    assert (final / "theirs").read_text() == "theirs"


WRITER = """
import sys, time
from pathlib import Path
from gptlite.checkpoint import store
root = Path(sys.argv[1])
with store.writing(root, print), store.staged(root / "step-00000300") as folder:
    (folder / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_leftovers_go_only_when_their_writer_is_dead(save, checkpointer):
    command = [sys.executable, "-c", WRITER, str(checkpointer.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            save(100)
            save(150)  # a second one: the first must not have given up the other writer's claim
            (left,) = checkpointer.root.glob(".tmp-*")
            assert (left / "half").read_text() == "half"
        finally:
            writer.kill()
    assert left.exists(), "a killed process cannot clean up; the test would prove nothing"
    assert checkpointer.find("auto").name == "step-00000150"
    save(200)
    assert list(checkpointer.root.glob(".tmp-*")) == []


def test_half_deleted_checkpoints_are_cleaned_and_others_files_are_not(save, checkpointer):
    save(100)
    (checkpointer.root / ".trash-step-00000050-x").mkdir()
    (checkpointer.root / ".tmp-latest-x").write_text("")
    (checkpointer.root / "notes.txt").write_text("mine")
    lines: list[str] = []
    with store.writing(checkpointer.root, lines.append):
        pass
    assert {path.name for path in checkpointer.root.iterdir()} == {".lock", "latest", "notes.txt", "step-00000100"}
    assert len(lines) == 2
    assert "left by a process" in lines[0]


def test_without_file_locks_leftovers_stay(save, checkpointer, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    left = checkpointer.root / ".tmp-step-00000050-x"
    left.mkdir(parents=True)
    assert save(100) == checkpointer.find("auto")
    assert left.exists()
