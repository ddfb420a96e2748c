"""A cache of compiled code that another user could change is not used."""

import os
import tempfile
from pathlib import Path

import pytest

from gptlite.kernels.cache import home_folder, refuse_writers, writable_folder
from gptlite.kernels.toolchain import BuildError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "above" / "gptlite" / "kernels"
    folder.mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "above"))
    return folder


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o555])
def test_a_folder_that_others_may_only_read_is_used(cache: Path, mode: int) -> None:
    cache.chmod(mode)
    assert home_folder() == cache


@pytest.mark.parametrize("above", [False, True])
def test_a_folder_that_all_may_write_is_not(cache: Path, above: bool) -> None:
    changed = cache.parents[1] if above else cache
    changed.chmod(0o777)
    with pytest.raises(BuildError, match=f"{changed} can be changed by another user"):
        home_folder()


def test_with_the_sticky_bit_only_the_folder_itself_counts(cache: Path) -> None:
    cache.parents[1].chmod(0o1777)
    assert home_folder() == cache
    cache.chmod(0o1777)
    with pytest.raises(BuildError, match="can be changed by another user"):
        home_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_folder_and_group_are_not(cache: Path) -> None:
    os.chown(cache, 12345, -1)
    with pytest.raises(BuildError, match="can be changed by another user"):
        refuse_writers(cache)
    os.chown(cache, 0, 12345)
    cache.chmod(0o775)
    with pytest.raises(BuildError, match="can be changed by another user"):
        refuse_writers(cache)
    cache.chmod(0o755)
    refuse_writers(cache)


def test_a_folder_other_than_the_first_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    assert writable_folder(lines.append) == cache
    assert lines == []
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = writable_folder(lines.append)
    assert folder.parent == tmp_path
    (line,) = lines
    assert "/proc/nowhere" in line
    assert line.endswith(f"; the library is stored in {folder} instead")
