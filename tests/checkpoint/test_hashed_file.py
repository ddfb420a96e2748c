"""Bytes that go to the disk in any portions, and their hash."""

import errno
import hashlib
import os
import random

import pytest
from checkpoint.conftest import disk_full

from gptlite.checkpoint import hashed_file
from gptlite.checkpoint.hashed_file import PIECE, HashedFile


@pytest.mark.parametrize("size", [0, 1, 4095, PIECE - 1, PIECE, PIECE + 1, 6 * PIECE + 12345])
def test_what_is_written_is_there_and_hashed(tmp_path, size):
    content = random.Random(size).randbytes(size)
    with HashedFile(tmp_path / "a") as file:
        portions, start = random.Random(1), 0
        while start < size:
            count = portions.choice([1, 63, 5000, PIECE // 2, 3 * PIECE])
            # A buffer that is used again at once, as torch's are.
            portion = bytearray(content[start : start + count])
            assert file.write(portion) == len(portion)
            portion[:] = b"x" * len(portion)
            start += count
            assert file.tell() == min(start, size)
    assert (tmp_path / "a").read_bytes() == content
    assert file.entry == {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}


def test_a_disk_that_takes_less_than_it_is_given_and_no_direct_writes(tmp_path, monkeypatch):
    original, calls = os.pwrite, []

    def pwrite(descriptor, view, offset):
        calls.append(len(view))
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, view[: 4096 * 100], offset)

    monkeypatch.setattr(hashed_file.os, "pwrite", pwrite)
    content = random.Random(0).randbytes(2 * PIECE + 17)
    with HashedFile(tmp_path / "a") as file:
        file._direct = True  # whatever the file system of the test
        file.write(content)
    assert (tmp_path / "a").read_bytes() == content
    assert len(calls) > 10


def test_the_first_error_is_kept_and_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(hashed_file.os, "pwrite", disk_full)
    file = HashedFile(tmp_path / "a")

    def fill():
        with file:
            file.write(b"x" * 20 * PIECE)

    with pytest.raises(OSError, match="No space left"):
        fill()
    assert file.error is not None
    assert file.entry == {}


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"
