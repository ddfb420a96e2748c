"""A file is the old one or the whole new one, and nothing else is left."""

import os
import socket
from pathlib import Path

import pytest

from gptlite.errors import ConfigError
from gptlite.files import open_regular, refuse_special, replacing, try_lock, write_whole


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


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_only_regular_files_are_read(tmp_path: Path, monkeypatch, kind, linked):
    monkeypatch.chdir(tmp_path)  # a socket's path is at most 108 bytes long
    path = Path("config.yaml")
    with socket.socket(socket.AF_UNIX) as listener:
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "socket":
                listener.bind(str(path))
            case "device":
                path = Path("/dev/zero")
        if linked:
            Path("link").symlink_to(path)
            path = Path("link")
        for read in (open_regular, refuse_special):
            with pytest.raises(ConfigError, match=f"^{path} is a {kind}, not a regular file; replace it"):
                read(path)


def test_a_file_exchanged_for_a_pipe_is_refused_when_open(tmp_path: Path, monkeypatch):
    path, regular = tmp_path / "train.bin", os.stat(__file__)
    os.mkfifo(path)
    monkeypatch.setattr(os, "stat", lambda _: regular)
    descriptors = len(os.listdir("/dev/fd"))
    with pytest.raises(ConfigError, match="is a pipe"):
        open_regular(path)
    assert len(os.listdir("/dev/fd")) == descriptors


def test_a_regular_file_is_read_through_a_link(tmp_path: Path):
    (tmp_path / "file").write_text("\u6f22", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        refuse_special(tmp_path / name)
        with open_regular(tmp_path / name, "r", encoding="utf-8") as file:
            assert file.read() == "\u6f22"
            assert os.get_blocking(file.fileno())
    refuse_special(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
