"""A run, a sweep and their tools write only inside the folder that the user named, whatever links others left in it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gptlite.checkpoint import store
from gptlite.config import load
from gptlite.data.order_log import FILE_NAME, note_spike
from gptlite.errors import ConfigError
from gptlite.files import make_inside, open_inside
from gptlite.metrics.jsonl import JsonlSink, truncate_after
from gptlite.satellites.sweep.folder import SweepFolder
from gptlite.satellites.sweep.job import output_in
from gptlite.start.pretrain import pretrain
from gptlite.trainer.folder import WRITTEN

KEPT = "not to be touched\n"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of somebody else."""
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_text(KEPT)
    return path


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_a_run_folder_is_refused_before_anything_is_written(
    tiny: list[str], tmp_path: Path, victim: Path, name: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(victim if "." in name else victim.parent)
    config = load([*tiny, f"run.dir={folder}", "run.name=x"])
    with pytest.raises(ConfigError, match=rf"run.dir=.*{name} is a symbolic link, .*; remove the link"):
        pretrain(config)
    assert victim.read_text() == KEPT
    assert list(victim.parent.iterdir()) == [victim]
    assert list(folder.iterdir()) == [folder / name]


def test_the_folder_itself_may_be_a_link(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    code, _ = run("run", "trainer.max_steps=2")
    assert code == 0
    assert (tmp_path / "disk" / "result.json").exists()


@pytest.mark.parametrize("mode", ["a", "w", "r+", "ab", "a+"])
def test_no_link_is_opened(tmp_path: Path, victim: Path, mode: str) -> None:
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "file").symlink_to(victim)
    (root / "folder").symlink_to(victim.parent)
    (root / "real" / "file").symlink_to(victim)
    for path in ("file", "folder/victim", "real/file"):
        with pytest.raises(OSError, match="a symbolic link leads elsewhere") as error:
            open_inside(root, root / path, mode)
        assert error.value.filename == str(root / path)
    assert victim.read_text() == KEPT
    with pytest.raises(ValueError, match="not in the subpath"):
        open_inside(root, victim, mode)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for mode in ("a", "r+"):  # a writer without a reader, and both
        with pytest.raises(OSError, match=r"not a regular file|No such device"):
            open_inside(tmp_path, tmp_path / "pipe", mode)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        open_inside(tmp_path, tmp_path / "folder", "a")


def test_a_file_is_written_as_by_open(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for root in (tmp_path, tmp_path / "link"):
        make_inside(root, "sub")
        with open_inside(root, root / "sub" / "file", "a", encoding="utf-8") as file:
            file.write("é\n")
            assert os.get_blocking(file.fileno())
    assert (tmp_path / "sub" / "file").read_text(encoding="utf-8") == "é\né\n"
    assert (tmp_path / "sub" / "file").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_linked_file_is_not_appended_to(tmp_path: Path, victim: Path) -> None:
    root = tmp_path / "run"
    (root / "records").mkdir(parents=True)
    for name in ("metrics.jsonl", FILE_NAME, "records/3.log"):
        (root / name).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        JsonlSink(root / "metrics.jsonl")
    with pytest.raises(OSError, match="symbolic link"):
        note_spike(root, 1, 2, (3, 4))
    with pytest.raises(OSError, match="symbolic link"), output_in(root / "records" / "3.log"):
        pass
    (root / "metrics.jsonl").unlink()
    (root / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (root / "metrics.replaced.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        truncate_after(root / "metrics.jsonl", 1)
    assert victim.read_text() == KEPT
    assert (root / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("name", [".lock", ".update", "records"])
def test_a_sweep_writes_through_no_link(tmp_path: Path, victim: Path, name: str) -> None:
    root = tmp_path / "sweep"
    root.mkdir()
    (root / name).symlink_to(victim if name[0] == "." else victim.parent)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link; a sweep writes only in its folder"):
        SweepFolder(root).refuse()
    with pytest.raises(OSError, match="symbolic link"):
        SweepFolder(root).open({})
    assert victim.read_text() == KEPT
    assert list(victim.parent.iterdir()) == [victim]


def test_what_is_deleted_is_not_behind_a_link(tmp_path: Path, victim: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    for name in (".tmp-step-1", ".trash-step-2", "step-00000003"):
        (root / name).symlink_to(victim.parent)
    (root / ".tmp-file").symlink_to(victim)
    with store.writing(root, lambda text: None):
        pass
    store.remove(root / "step-00000003")
    assert [path.name for path in root.iterdir()] == [".lock"]
    assert victim.read_text() == KEPT
    root.joinpath("link").symlink_to(victim.parent)
    with pytest.raises(OSError, match="symbolic link"), store.writing(root / "link", lambda text: None):
        pass
    assert list(victim.parent.iterdir()) == [victim]
