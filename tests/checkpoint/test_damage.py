"""Whatever happens to the bytes of the newest checkpoint is noticed, named and logged, and the one before is taken."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint.conftest import FakeTokenizer
from checkpoint.destruction.campaign import Lives, differing, quiet, stored
from checkpoint.destruction.forks import shared_server
from checkpoint.destruction.lives import TINY
from checkpoint.destruction.wounds import cuts, files_of, flip, flips, wounded

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.manifest import DamagedCheckpoint
from gptlite.checkpoint.store import step_folders

CONFIG = "".join(f"key{number}: {number * number}\n" for number in range(40))
FLIPS, CUTS = 1000, 20


class Store:
    """Two checkpoints of different tensors."""

    def __init__(self, run: Path) -> None:
        self.checkpointer = Checkpointer(CheckpointConfig(keep=0), run)
        generator = torch.Generator().manual_seed(0)
        for step in (100, 200):
            tensors = {f"layers.{i}.weight": torch.randn(24, 32, generator=generator) for i in range(6)}
            tensors["optim.step"] = torch.tensor(float(step))
            self.checkpointer.save(tensors, {"step": step, "tokens": step << 20}, CONFIG, FakeTokenizer(), quiet)
        self.newest, self.older = step_folders(self.checkpointer.root)

    def check_rejected(self, name: str, reason: str = "") -> None:
        """The newest is refused for this file, and the older one found; the log says both."""
        words = f"{self.newest} cannot be used: {name}"
        with pytest.raises(DamagedCheckpoint, match=re.escape(words)) as refusal:
            self.checkpointer.find(str(self.newest), quiet)
        assert "\n" not in str(refusal.value)
        lines: list[str] = []
        assert self.checkpointer.find("auto", lines.append) == self.older
        (line,) = lines
        assert f"{self.newest}: {name}" in line
        assert reason in line


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("damage") / "run")
    yield store
    assert store.checkpointer.find("auto") == store.newest, "not healed"


@pytest.mark.parametrize(
    ("count", "seed"), [(100, 0), pytest.param(FLIPS, 1, marks=pytest.mark.slow)], ids=["100", "all"]
)
def test_every_flipped_bit_is_noticed(pair, count, seed):
    hit: Counter[str] = Counter()
    for name, content in flips(pair.newest, count, seed):
        with wounded(pair.newest / name, content):
            pair.check_rejected(name)
        hit[name] += 1
    assert hit.total() == count
    assert set(hit) == set(files_of(pair.newest))
    assert min(hit.values()) >= count // 2 // len(hit)


@pytest.mark.parametrize("count", [4, pytest.param(CUTS, marks=pytest.mark.slow)])
def test_every_truncation_is_noticed(pair, count):
    for name in files_of(pair.newest):
        shorter = cuts((pair.newest / name).read_bytes(), count, seed=len(name))
        assert len(shorter) == count, name
        if name == "MANIFEST.json":
            del shorter[-1]  # all but the newline at its end: nothing is missing
        for content in shorter:
            with wounded(pair.newest / name, content):
                pair.check_rejected(name)


def test_a_manifest_whose_last_newline_an_editor_took_is_whole(pair):
    path = pair.newest / "MANIFEST.json"
    with wounded(path, path.read_bytes().removesuffix(b"\n")):
        assert pair.checkpointer.find("auto", print) == pair.newest


def changed(content: bytes, older: bytes) -> dict[str, tuple[bytes | None, str]]:
    """What may become of a file and the reason given, by what to call it; `older` is the other step's of that name."""
    block, sizes, bytes_ = len(content) // 3, "bytes, but its manifest lists", "has damaged bytes"
    return {
        "missing": (None, "is missing"),
        "empty": (b"", sizes),
        "of the other step": (older, bytes_ if len(older) == len(content) else sizes),
        "with appended bytes": (content + b"\0", sizes),
        "with another file at its end": (content + older, sizes),
        "with a zeroed block": (content[:block] + bytes(block) + content[2 * block :], bytes_),
        "of zeros": (bytes(len(content)), bytes_),
        "with two blocks swapped": (content[block : 2 * block] + content[:block] + content[2 * block :], bytes_),
    }


def test_files_that_are_missing_or_of_something_else_are_noticed(pair):
    tried: Counter[str] = Counter()
    for name in files_of(pair.newest):
        intact, older = (pair.newest / name).read_bytes(), (pair.older / name).read_bytes()
        for what, (content, reason) in changed(intact, older).items():
            if content == intact:  # both steps have the same tokenizer
                continue
            if name == "MANIFEST.json" and content is not None:
                reason = "belongs to step 100" if what == "of the other step" else "is not a manifest"
            with wounded(pair.newest / name, content):
                pair.check_rejected(name, reason)
            tried[what] += 1
    assert len(tried) == 8
    assert tried["missing"] == len(files_of(pair.newest))


def test_a_manifest_that_was_edited_is_noticed(pair):
    path = pair.newest / "MANIFEST.json"
    with wounded(path, path.read_bytes().replace(b'"step": 200', b'"step": 999')):
        pair.check_rejected("MANIFEST.json", "was altered: its checksum differs")


def test_a_folder_under_another_steps_name_is_noticed(pair):
    impostor = pair.newest.with_name("step-00000300")
    pair.older.rename(impostor)
    try:
        lines: list[str] = []
        assert pair.checkpointer.find("auto", lines.append) == pair.newest
        assert "MANIFEST.json belongs to step 100" in lines[0]
    finally:
        impostor.rename(pair.older)


def test_a_file_that_is_none_of_the_checkpoint_changes_nothing(pair):
    before = stored(pair.newest)
    strangers = [pair.newest / name for name in ("notes.txt", "data/__9_0.distcp", "data/.DS_Store")]
    for path in strangers:
        path.write_bytes(b"mine")
    try:
        assert pair.checkpointer.find("auto") == pair.newest
        assert stored(pair.newest) == before
    finally:
        for path in strangers:
            path.unlink()


@pytest.mark.parametrize("instead", [Path.mkdir, lambda path: path.symlink_to("nowhere")], ids=["folder", "dangling"])
def test_what_is_no_file_is_noticed(pair, instead: Callable[[Path], None]):
    for name in files_of(pair.newest):
        path = pair.newest / name
        kept = path.rename(pair.newest.parent / "kept")
        instead(path)
        try:
            pair.check_rejected(name)
        finally:
            path.rmdir() if path.is_dir() else path.unlink()
            kept.rename(path)


@pytest.mark.slow
def test_a_run_goes_on_from_the_one_before_and_repeats_the_numbers(tmp_path):
    overrides, lives = [*TINY, f"run.dir={tmp_path / 'run'}", "checkpoint.interval=2"], Lives(shared_server(), tmp_path)

    def live(*more: str) -> str:
        assert lives.live([*overrides, *more]) == [0], lives.said()
        return lives.said()

    live("trainer.max_steps=4")
    damaged, older = step_folders(tmp_path / "run" / "checkpoints")
    flip(damaged / "data" / "__0_0.distcp", mask=4)
    content = (damaged / "data" / "__0_0.distcp").read_bytes()
    said = live("trainer.max_steps=6")
    assert f"rejected {damaged}: data/__0_0.distcp has damaged bytes" in said
    assert f"resuming from {older}" in said
    live("trainer.max_steps=6", f"run.dir={tmp_path / 'whole'}")
    for step in ("step-00000004", "step-00000006"):
        assert differing(*(tmp_path / name / "checkpoints" / step for name in ("run", "whole"))) == []
    (aside,) = damaged.parent.glob("damaged-*")
    assert (aside / "data" / "__0_0.distcp").read_bytes() == content
