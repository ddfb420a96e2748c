"""A folder appears whole, whatever ends the process that writes it, and nothing that a user wrote is lost."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from run_files import snapshot

from gptlite.errors import ConfigError
from gptlite.files import new_folder, refuse_used

CALLS = ("mkdir", "rename", "unlink", "rmdir", "fsync")
MOST = 30  # calls that change the disk, at least as many as `write` makes


def write(folder: Path, words: str, *, replace: bool = False) -> None:
    with new_folder(folder, replace=replace) as whole:
        (whole / "sub").mkdir()
        (whole / "sub" / "file").write_text(words)
        (whole / "name").write_text("x")


def killed(action: Callable[[], None], number: int) -> bool:
    """Run an action in a fork that is killed before its call of this number. Returns False if it ended before."""
    if not (child := os.fork()):
        with suppress(BaseException):
            die_at(number)
            action()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the action failed"
    return os.WIFSIGNALED(status)


def die_at(number: int) -> None:
    """Count this process's calls that change the disk, and kill it before the one of this number."""
    calls = [0]

    def counted(original: Callable) -> Callable:
        def call(*arguments, **options):
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            return original(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("replace", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_folder(tmp_path, replace):
    folder = tmp_path / "new"
    finished = set()
    for number in range(MOST):
        if replace:
            write(folder, "old", replace=True)
        dead = killed(lambda: write(folder, "first", replace=replace), number)
        before = (folder / "sub" / "file").read_text() if folder.exists() else None
        finished.add(before)
        if before == "first" and not replace:  # finished: not overwritten, and no leftovers
            with pytest.raises(ConfigError, match="exists; nothing is overwritten"):
                refuse_used("folder", folder)
        else:
            if replace:  # a call that fails leaves the old one, too
                with pytest.raises(ZeroDivisionError), new_folder(folder, replace=True):
                    raise ZeroDivisionError
                assert (folder / "sub" / "file").read_text() == (before or "old")
            write(folder, "second", replace=replace)
            assert (folder / "sub" / "file").read_text() == "second"
        assert [each.name for each in tmp_path.iterdir()] == ["new"]
        assert set(snapshot(folder)) == {"sub/file", "name"}
        if not replace:
            for name in ("sub/file", "name"):
                (folder / name).unlink()
            (folder / "sub").rmdir()
            folder.rmdir()
        if not dead:
            break
    assert not dead, "MOST is too small"
    assert finished >= {"first", None}  # None: with `replace`, the old folder is still in the other one
    assert ("old" in finished) == replace


def test_two_at_once_refuse_each_other(tmp_path):
    folder = tmp_path / "new"
    with new_folder(folder) as whole:
        (whole / "file").write_text("first")
        with pytest.raises(ConfigError, match="new is being written by another process; wait for it, or give another"):
            write(folder, "second")
        first = {"new/file": next(iter(snapshot(whole).values()))}
    assert snapshot(tmp_path) == first
    with pytest.raises(ConfigError, match="new exists; nothing is overwritten"):
        write(folder, "second")
    assert snapshot(tmp_path) == first


def test_without_locks_a_leftover_is_the_users_decision(tmp_path, monkeypatch):
    monkeypatch.setattr("gptlite.files.try_lock", lambda _: None)
    folder = tmp_path / "new"
    write(folder, "first")
    folder.rename(tmp_path / "kept")
    assert killed(lambda: write(folder, "first"), 8)
    (left,) = {each.name for each in tmp_path.iterdir()} - {"kept"}
    with pytest.raises(ConfigError, match=rf"may be being written by another process; if it is not, remove .*{left}$"):
        write(folder, "second")
    assert (tmp_path / left).exists()


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_folder_of_the_users_with_the_temporary_name_is_not_touched(tmp_path, kind):
    partial, elsewhere = tmp_path / ".new.partial", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    match kind:
        case "folder":
            elsewhere.rename(partial)
        case "link":
            partial.symlink_to(elsewhere)
        case "file":
            partial.write_text("x")
    before = snapshot(tmp_path)
    with pytest.raises((ConfigError, OSError), match=r"mine, which gptlite has not written|link leads|File exists"):
        write(tmp_path / "new", "x")
    assert {name: data for name, data in snapshot(tmp_path).items() if not name.endswith("lock")} == before


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a" / "new") as whole:
        (whole / "file").write_text(str(1 / 0))
    assert list((tmp_path / "a").iterdir()) == []


def test_a_run_folder_may_hold_only_what_a_killed_import_left(tmp_path):
    run = tmp_path / "run"
    refuse_used("run_dir", run, holding="checkpoints")
    (run / ".checkpoints.partial").mkdir(parents=True)
    refuse_used("run_dir", run, holding="checkpoints")
    with pytest.raises(ConfigError, match=r"run_dir=.*exists; nothing is overwritten"):
        refuse_used("run_dir", run)
    with pytest.raises(ConfigError, match="run_dir=/ exists"):
        refuse_used("run_dir", Path("/"))
    (run / "mine").write_text("x")
    with pytest.raises(ConfigError, match=r"run_dir=.*exists; nothing is overwritten"):
        refuse_used("run_dir", run, holding="checkpoints")
