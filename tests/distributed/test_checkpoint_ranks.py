"""Checkpoints of several ranks: what each layout saves comes back, what fails on one rank fails on all."""

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from distributed.cells.checkpoints import LAYOUTS, whole_tensors
from distributed.cells.run import RankFailed
from gptlite.checkpoint import store
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import describe, read_manifest, verify

CASES = "distributed.cells.checkpoints:"
# By turns in the foreground and beside training; the other way, too, in the slow tests.
QUICK = ("fsdp2_tp2", "hsdp", "ddp4", "pp2_tp2")
SAVES = [
    pytest.param(layout, beside, id=f"{layout}-{'async' if beside else 'sync'}", marks=marks)
    for first in (0, 1)
    for number, layout in enumerate(LAYOUTS, first)
    for beside in [number % 2 == 1]
    for marks in [() if first == 0 and layout in QUICK else (pytest.mark.slow,)]
]


def check_whole(folder: Path) -> None:
    """All tensors of all ranks are there, whole, to be read by one process, ours and torch's own, and stored once: a
    tied embedding of two stages, too."""
    expected = whole_tensors()
    assert read_manifest(folder).tensors == {key: describe(expected[key]) for key in read_manifest(folder).tensors}
    assert set(read_manifest(folder).tensors) == set(expected)
    ours = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    load_tensors(folder, ours)
    theirs = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    load(theirs, checkpoint_id=folder / "data", no_dist=True)
    for key, tensor in expected.items():
        assert torch.equal(ours[key], tensor), key
        assert torch.equal(theirs[key], tensor), key
    metadata = FileSystemReader(folder / "data").read_metadata()
    for key, tensor in expected.items():
        chunks = metadata.state_dict_metadata[key].chunks
        assert sum(math.prod(chunk.sizes) for chunk in chunks) == tensor.numel(), key
    assert len(metadata.storage_data) == sum(len(e.chunks) for e in metadata.state_dict_metadata.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("layout", "beside"), SAVES)
def test_what_ranks_save_comes_back_bit_for_bit(four, tmp_path, layout, beside):
    results = four.run(CASES + "save_and_read_back", tmp_path, layout, beside)
    assert [wrong for _, wrong in results] == [[]] * 4
    assert {folder for folder, _ in results} == {tmp_path / "checkpoints" / "step-00000100"}
    folder, _ = results[0]
    check_whole(folder)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000100\n"
    files = {path.name for path in (folder / "data").iterdir()}
    assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}  # each has written its share
    verify(folder, print)


@pytest.mark.parametrize(
    "beside", [pytest.param(False, id="sync", marks=pytest.mark.slow), pytest.param(True, id="async")]
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(four, tmp_path, beside):
    (tmp_path / "file").write_text("")
    raised = four.run(CASES + "fail_to_save", tmp_path, "fsdp2_tp2", beside)
    unknown = [each.pop("unknown error") for each in raised]
    assert unknown[3] == "Unknown: 1 2"
    assert all(text.startswith("RuntimeError: on rank 3:") and "Unknown: 1 2" in text for text in unknown[:3])
    assert raised[1:] == raised[:1] * 3
    words = {
        "disk full": "OSError: [Errno 28] No space left on device",
        "disk full on rank 0": "OSError: [Errno 28] No space left on device",
        "interrupted": "KeyboardInterrupt: ",
        "fsync of its tensors": "OSError: [Errno 5] Input/output error",
        "fsync of the manifest": "OSError: [Errno 5] Input/output error",
        "fsync of the folder": "OSError: [Errno 5] Input/output error",
        "tokenizer": "RuntimeError: no vocabulary",
        "no tensor": "TypeError: checkpoint key lr is a float",
    }
    for name, start in words.items():
        assert raised[0][name].startswith(start), name
    assert "not JSON serializable" in raised[0]["meta"]
    assert raised[0]["two shapes"].startswith("ValueError")
    assert raised[0]["unwritable"].startswith("NotADirectoryError")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".lock", "latest", "step-00000100"}
    verify(tmp_path / "checkpoints" / "step-00000100", print)


def test_a_load_that_fails_on_one_rank_fails_on_all(four, tmp_path):
    raised = four.run(CASES + "fail_to_load", tmp_path, "pp2_tp2")
    assert raised[1:] == raised[:1] * 3
    assert "more is absent there, float32 [2] here" in raised[0]["missing there"]
    words = "model.layers.3.up.bias is float32 [12] there, absent here (and 3 other mismatches)"
    assert words in raised[0]["missing here"]
    assert raised[0]["not strict"] == "nothing"
    assert "model.layers.0.up.bias is float32 [12] there, float32 [7] here" in raised[0]["another shape"]
    assert raised[0]["damaged"].startswith("DamagedCheckpoint: ")
    assert "SHA-256 differs" in raised[0]["damaged"]
    assert raised[0]["damaged since it was verified"] != "nothing"
    assert raised[0]["touched"] == "[]"


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_save_leaves_the_older_ones(four, tmp_path, victim):
    with pytest.raises(RankFailed, match="ended with status -9") as failure:
        four.run(CASES + "die_in_save", tmp_path, "fsdp2_tp2", victim, timeout=30)
    assert failure.value.rank == victim
    survivors = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
    assert len(survivors) == 3  # each knew soon that the save had failed
    assert "nothing" not in survivors.values()
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    assert [path.name for path in store.step_folders(checkpointer.root)] == ["step-00000400"]
    assert checkpointer.find("auto") == checkpointer.root / "step-00000400"
    checkpointer.save({"w": torch.zeros(1)}, {"step": 600}, "", None, print)
    assert list(checkpointer.root.glob(".tmp-*")) == []
