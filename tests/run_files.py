"""Reading what a run left."""

import hashlib
import json
from pathlib import Path

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


def checkpoint(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the meta data of a run's checkpoint."""
    path = folder / "checkpoints" / f"step-{step:08}"
    manifest = read_manifest(path)
    assert {entry["dtype"] for entry in manifest.tensors.values()} == {"float32"}
    tensors = {key: torch.empty(entry["shape"]) for key, entry in manifest.tensors.items()}
    load_tensors(path, tensors)
    return tensors, manifest.meta


def differing(one: Path, other: Path, step: int) -> list[str]:
    """The tensors of two runs' checkpoints that are not the same bits, -0 and 0 among them."""
    ours, theirs = (checkpoint(each, step)[0] for each in (one, other))
    assert ours.keys() == theirs.keys()
    return [key for key in ours if not torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32))]
