"""A file is the old one or the whole new one, and nothing else is left."""

import os
from pathlib import Path

import pytest

from gptlite.files import replacing, try_lock, write_whole


@pytest.mark.parametrize("content", ["text: \u6f22\n", b"\0bytes", ""])
def test_a_file_is_written_and_replaced(tmp_path, content):
    path = tmp_path / "file"
    for old in ("first", "a longer one than the new"):
        path.write_text(old)
        write_whole(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"half of the n")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_name_comes_last_and_the_bytes_are_on_the_disk_before_it(tmp_path, monkeypatch):
    done = []

    def noted(name):
        original = getattr(os, name)

        def call(*arguments):
            done.append(name)
            return original(*arguments)

        monkeypatch.setattr(os, name, call)

    noted("fsync")
    noted("replace")
    with replacing(tmp_path / "file") as file:
        file.write(b"x")
        assert not (tmp_path / "file").exists()
        (temporary,) = tmp_path.iterdir()
        assert Path(file.name) == temporary
    assert done == ["fsync", "replace", "fsync"]


def test_a_lock_is_held_alone_or_shared_and_a_file_system_without_locks_is_told_apart(tmp_path: Path, monkeypatch):
    with open(tmp_path / "lock", "w") as first, open(tmp_path / "lock", "w") as second:
        assert try_lock(first) is True
        assert try_lock(second) is False
        assert try_lock(second, shared=True) is False
        assert try_lock(first, shared=True, wait=True) is True
        assert try_lock(second, shared=True) is True
        assert try_lock(second) is False
    with open(tmp_path / "lock", "w") as third:
        assert try_lock(third) is True  # released with the files

        def unsupported(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("fcntl.flock", unsupported)
        assert try_lock(third) is None
