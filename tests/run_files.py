"""Reading what a run left, and runs without plots."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import read_manifest


def read_metrics(folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below a folder, with the hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def on_disk(folder: Path) -> int:
    """Bytes that a folder takes on a disk with blocks of 4096 bytes."""
    sizes = [path.stat().st_size if path.is_file() else 4096 for path in (folder, *folder.rglob("*"))]
    return sum(-(-size // 4096) * 4096 for size in sizes)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a run's checkpoint."""
    return folder / "checkpoints" / f"step-{step:08}"


def meta(folder: Path, step: int) -> dict:
    """The meta data of a run's checkpoint."""
    return read_manifest(step_folder(folder, step)).meta


def checkpoint(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the meta data of a run's checkpoint."""
    path = step_folder(folder, step)
    manifest = read_manifest(path)
    assert {entry["dtype"] for entry in manifest.tensors.values()} == {"float32"}
    tensors = {key: torch.empty(entry["shape"]) for key, entry in manifest.tensors.items()}
    load_tensors(path, tensors)
    return tensors, manifest.meta


def differing(one: Path, other: Path, step: int) -> list[str]:
    """The tensors of two runs' checkpoints that are not the same bits, -0 and 0 among them."""
    stored = [snapshot(step_folder(each, step) / "data") for each in (one, other)]
    if stored[0] and stored[0] == stored[1]:
        return []
    ours, theirs = (checkpoint(each, step)[0] for each in (one, other))
    assert ours.keys() == theirs.keys()
    return [key for key in ours if not torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32))]


@contextmanager
def without_plots() -> Iterator[None]:
    """Runs end without a picture of their curves, which takes a third of a tiny run."""
    with mock.patch("gptlite.start.run.drawn"):
        yield
