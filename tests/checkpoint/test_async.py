"""Saves beside the training: what is stored is what was there when `save` was called, and no failure is lost."""

import errno
import os
import threading
import time

import pytest
import torch
from checkpoint.conftest import FakeTokenizer, all_bits, disk_full, read_bits
from checkpoint.destruction.wounds import flip

from gptlite.checkpoint import store
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.manifest import verify


@pytest.fixture
def beside(tmp_path):
    with_limit = CheckpointConfig(keep=0, async_save=True, timeout_seconds=20)
    checkpointer = Checkpointer(with_limit, tmp_path / "run")
    yield checkpointer
    checkpointer.close()


class Gate:
    """os.fsync that waits until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        original = os.fsync

        def fsync(descriptor: int) -> None:
            self.reached.set()
            assert self.open.wait(30)
            original(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def begin(checkpointer, tensors, step):
    return checkpointer.save(tensors, {"step": step}, "seed: 1\n", None, print)


def test_training_goes_on_and_what_was_there_is_stored(beside, tensors, gate):
    expected = all_bits(tensors)
    folder = begin(beside, tensors, 1)
    assert gate.reached.wait(10)  # it is being written
    for tensor in tensors.values():
        tensor.fill_(3)
    assert not folder.exists()
    gate.open.set()
    beside.finish()
    verify(folder, print)
    assert read_bits(folder, tensors) == expected


def test_the_next_save_waits_for_the_one_in_flight_and_its_copy_is_not_shared(beside, tensors, gate):
    first = begin(beside, tensors, 1)
    expected = all_bits(tensors)
    tensors["half"].fill_(2)
    threading.Timer(0.3, gate.open.set).start()
    began = time.monotonic()
    second = begin(beside, tensors, 2)
    assert time.monotonic() - began > 0.2
    assert first.exists()
    beside.finish()
    assert read_bits(first, tensors) == expected
    assert read_bits(second, tensors) == all_bits(tensors)


def test_a_failure_is_known_at_the_next_step_and_raised_once(beside, tensors, monkeypatch):
    good = begin(beside, tensors, 1)
    beside.finish()
    assert not beside.failed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        begin(beside, tensors, 2)
        deadline = time.monotonic() + 10
        while not beside.failed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(OSError, match="No space left"):
            begin(beside, tensors, 3)
    assert not beside.failed
    assert store.step_folders(beside.root) == [good]
    assert list(beside.root.glob(".tmp*")) == []
    begin(beside, tensors, 3)
    beside.finish()
    assert len(store.step_folders(beside.root)) == 2


def test_a_file_system_that_hangs_ends_the_wait(tmp_path, tensors, gate):
    checkpointer = Checkpointer(CheckpointConfig(async_save=True, timeout_seconds=0.3), tmp_path / "run")
    begin(checkpointer, tensors, 7)
    assert not checkpointer.failed
    time.sleep(0.4)
    assert checkpointer.failed
    with pytest.raises(
        TimeoutError, match=r"step-00000007 was not written within checkpoint.timeout_seconds=0.3: its file"
    ):
        checkpointer.finish()
    began = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - began < 1
    gate.open.set()


def test_closing_waits_and_tells_of_a_failure(beside, tensors, monkeypatch, gate):
    folder = begin(beside, tensors, 1)
    threading.Timer(0.2, gate.open.set).start()
    beside.close()
    assert folder.exists()

    lines: list[str] = []
    beside.save(tensors, {"step": 2}, "", FakeTokenizer(RuntimeError("no vocabulary")), print)
    beside.close(lines.append)
    assert lines == ["checkpoint: the last save failed: RuntimeError: no vocabulary"]


def test_a_copy_is_made_anew_where_a_shape_has_changed(beside):
    for size in (3, 5):
        begin(beside, tensors := {"w": torch.arange(size)}, size)
        beside.finish()
    assert read_bits(beside.root / "step-00000005", tensors) == all_bits(tensors)


@pytest.mark.parametrize("beside_training", [False, True])
def test_the_newest_and_every_so_many_stay(tmp_path, tensors, beside_training):
    config = CheckpointConfig(keep=2, keep_every=30, async_save=beside_training)
    checkpointer = Checkpointer(config, tmp_path)
    for step in range(10, 80, 10):
        begin(checkpointer, tensors, step)
    checkpointer.finish()
    kept = [store.step_of(folder) for folder in store.step_folders(checkpointer.root)]
    assert kept == [70, 60, 30]


def test_older_ones_stay_where_the_newest_does_not_read_back(tmp_path, tensors, monkeypatch):
    checkpointer = Checkpointer(CheckpointConfig(keep=1), tmp_path)
    begin(checkpointer, tensors, 1)
    original, lines = os.rename, []

    def rename_and_rot(old, new):
        original(old, new)
        if str(new).endswith("step-00000002"):
            flip(new / "data" / "__0_0.distcp")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_and_rot)
        checkpointer.save(tensors, {"step": 2}, "", None, lines.append)
    assert "step-00000002 failed verification: data/__0_0.distcp has damaged bytes" in lines[-1]
    assert [store.step_of(folder) for folder in store.step_folders(checkpointer.root)] == [2, 1]
    assert checkpointer.find("auto").name == "step-00000001"


@pytest.mark.parametrize("beside_training", [False, True])
def test_room_on_the_disk_is_looked_for_first(tmp_path, tensors, monkeypatch, beside_training):
    checkpointer = Checkpointer(CheckpointConfig(async_save=beside_training), tmp_path)
    full = type("usage", (), {"free": 5_000})
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: full)

    def save():
        begin(checkpointer, tensors, 1)
        checkpointer.finish()

    with pytest.raises(OSError, match=r"a checkpoint takes 0\.\d MB, but only 0\.0 MB are free") as caught:
        save()
    assert caught.value.errno == errno.ENOSPC
    assert store.step_folders(checkpointer.root) == []
