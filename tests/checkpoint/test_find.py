"""Which checkpoint a run starts from, whatever happened to the others; and how many stay."""

import os
import shutil

import pytest
from checkpoint.destruction.wounds import flip

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.find import find_checkpoint
from gptlite.checkpoint.manifest import DamagedCheckpoint, read_manifest
from gptlite.checkpoint.store import step_folders
from gptlite.commands.newest_run import newest_run
from gptlite.errors import ConfigError


def test_any_flipped_bit_of_the_manifest_is_noticed(save):
    folder = save(100)
    path = folder / "MANIFEST.json"
    intact = path.read_bytes()
    for offset in range(0, len(intact), 7):
        flip(path, offset, 1 << offset % 8)
        with pytest.raises(DamagedCheckpoint):
            read_manifest(folder)
        path.write_bytes(intact)
    read_manifest(folder)


def test_latest_is_only_a_hint(save, checkpointer):
    save(100)
    newest = save(200)
    (checkpointer.root / "latest").write_text("step-00000100\n")
    assert checkpointer.find("auto") == newest
    (checkpointer.root / "latest").unlink()
    assert checkpointer.find("auto") == newest


def test_steps_are_ordered_as_numbers(save, checkpointer):
    save(99_999_999)
    assert checkpointer.find("auto") != save(123_456_789).with_name("step-00000001")
    assert [path.name for path in step_folders(checkpointer.root)] == ["step-123456789", "step-99999999"]


def test_nothing_yet_is_a_fresh_start(checkpointer):
    assert checkpointer.find("auto") is None
    assert checkpointer.find("never") is None
    assert not checkpointer.root.exists()


def test_all_damaged_is_for_a_person_to_decide(save, checkpointer):
    for step in (100, 200):
        (save(step) / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"2 checkpoints found, but none is intact \(step-00000200: config.yaml is"):
        checkpointer.find("auto")


def test_a_step_a_checkpoints_folder_or_a_run_can_be_resumed(save, checkpointer, tmp_path):
    older, newest = save(100), save(200)
    other = Checkpointer(CheckpointConfig(), tmp_path / "other")
    assert other.find(str(older)) == older
    assert other.find(str(checkpointer.root)) == newest
    assert other.find(str(checkpointer.root.parent)) == newest
    copy = newest.rename(tmp_path / "best")
    assert other.find(str(copy)) == copy
    assert other.find(str(checkpointer.root.parent)) == older


def test_a_path_without_a_checkpoint_is_refused(checkpointer, tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        checkpointer.find(str(tmp_path))
    with pytest.raises(ConfigError, match="nowhere does not exist; give auto, never, a run folder or a"):
        checkpointer.find(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="resume=Auto does not exist; did you mean auto"):
        checkpointer.find("Auto")


def test_a_start_that_would_run_into_saved_steps_is_refused(save, checkpointer, tmp_path):
    older, newest = save(100), save(200)
    assert checkpointer.find(str(newest)) == newest
    for resume in ("never", str(older)):
        with pytest.raises(ConfigError, match="already holds step-00000200; use another"):
            checkpointer.find(resume)
    weights_only = Checkpointer(CheckpointConfig(load="weights"), checkpointer.root.parent)
    for resume in (str(newest), "auto"):
        with pytest.raises(ConfigError, match=r"starts from step 0.*already holds step-00000200.*checkpoint.load=all"):
            weights_only.find(resume)
    with pytest.raises(ConfigError, match=r"^checkpoint\.load=weights starts"):
        weights_only.find("auto")


def test_weights_alone_start_a_run_in_a_new_folder(save, tmp_path):
    newest = save(200)
    weights_only = Checkpointer(CheckpointConfig(load="weights"), tmp_path / "new")
    assert weights_only.find("auto") is None
    assert weights_only.find(str(newest)) == newest


def test_a_tools_checkpoint_is_found_and_its_own_key_is_named(save, checkpointer, tmp_path):
    older, newest = save(100), save(200)
    for path in (newest, checkpointer.root, checkpointer.root.parent):
        assert find_checkpoint(str(path), "checkpoint") == newest
    (newest / "config.yaml").unlink()
    lines: list[str] = []
    assert find_checkpoint(str(checkpointer.root), "checkpoint", lines.append) == older
    assert "config.yaml is missing" in lines[0]
    (older / "config.yaml").unlink()
    fix = "give a run folder or a checkpoint folder"
    for path, message in {
        tmp_path / "foo": rf"^checkpoint=.*foo does not exist; {fix}$",
        tmp_path: rf"^checkpoint=.* holds no checkpoint; {fix}$",
        older / "MANIFEST.json": "MANIFEST.json holds no checkpoint",
        checkpointer.root: "^checkpoint=.*: 2 checkpoints found, but none is intact.*; set checkpoint to another path$",
    }.items():
        with pytest.raises(ConfigError, match=message):
            find_checkpoint(str(path), "checkpoint", lines.append)


def test_retention_does_not_count_or_delete_damaged_ones(checkpointer, save):
    checkpointer.config.keep = 2
    first, damaged = save(100), save(200)
    (damaged / "config.yaml").unlink()
    newest = save(300)
    assert step_folders(checkpointer.root) == [newest, damaged, first]


def test_retention_never_removes_what_was_just_saved(checkpointer, save):
    newest = save(300)
    checkpointer.config.keep = 1
    assert save(200).exists()
    assert newest.exists()


def test_latest_is_the_run_that_wrote_a_checkpoint_last(save, checkpointer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="checkpoint=latest: no run below outputs/ has a checkpoint; give checkpoint=RUN"
    ):
        newest_run("latest", "checkpoint")
    step = save(100)
    for age, name in enumerate(["a", "sweeps/20261128-1/0-lr=1", "b", "unfinished"]):
        folder = tmp_path / "outputs" / name / "checkpoints"
        shutil.copytree(step, folder / step.name)
        time = 2_000_000_000 - age if name != "b" else 2_000_000_100
        os.utime(folder / step.name / "MANIFEST.json", (time, time))
    (tmp_path / "outputs" / "unfinished" / "checkpoints" / step.name / "MANIFEST.json").unlink()
    assert newest_run("latest", "checkpoint") == "outputs/b"
    assert capsys.readouterr().err == "checkpoint=outputs/b is the newest run\n"
    shutil.rmtree(tmp_path / "outputs" / "b")
    assert newest_run("latest", "checkpoint") == "outputs/a"
    shutil.rmtree(tmp_path / "outputs" / "a")
    assert newest_run("latest", "checkpoint") == "outputs/sweeps/20261128-1/0-lr=1"
    assert newest_run("outputs/a", "checkpoint") == "outputs/a"
    (tmp_path / "latest").mkdir()  # a folder of that name is meant
    assert newest_run("latest", "checkpoint") == "latest"
