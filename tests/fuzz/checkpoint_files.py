"""Checkpoints and weights."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from fuzz.mutations import json_files, octets
from fuzz.reader import Reader, quiet, reader

from gptlite.checkpoint import manifest as manifests
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.huggingface import SINGLE, Stored, load_pickle, open_weights, write_weights
from gptlite.checkpoint.load import load_tensors
from gptlite.data.stream import SampleStream
from gptlite.satellites.checkpoint_tool import inspect, ls
from gptlite.trainer.saved_meta import checked_meta


def _checkpoint(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {"model.w": torch.arange(6.0), "model.deep": torch.ones(3, 4), "optimizer.step": torch.tensor(1.0)}
    era = {
        "start": 0,
        "sequence_length": 8,
        "sets": {"a": {"data": "h", "tokens": 99, "weight": 1.0, "epoch": 0, "position": 2}},
    }
    meta = {
        **{
            "step": 1,
            "consumed_samples": 16,
            "tokens": 128,
            "best_val_loss": 2.5,
            "evaluated_step": 1,
            "wandb_id": "a1",
        },
        **{
            "data_identity": {"sequence_length": 8, "tokenizer": None},
            "data_order": [era],
            "skipped_samples": [[3, 5]],
        },
        "loss_scale": {"scale": 1024.0, "good_steps": 3, "overflows": 0, "skipped": 0},
        "spikes": {"steps": [[0, 2.5]], "high": [], "rewinds": 0},
    }
    saved = Checkpointer(CheckpointConfig(keep=0), folder / "run").save(tensors, meta, "seed: 1\n", None, quiet)
    return saved, tensors


@reader
def manifest(folder: Path) -> Reader:
    """MANIFEST.json with a valid checksum: inspect, ls, verify, and the state of a resumed run."""
    saved, _ = _checkpoint(folder)
    path = saved / manifests.FILE_NAME
    valid = json.loads(path.read_bytes())
    del valid["sha256"]

    def read(content: bytes) -> None:
        try:
            found = json.loads(content)
            assert isinstance(found, dict)
            content = json.dumps({"sha256": manifests._checksum(found), **found}).encode()
        except (ValueError, AssertionError, RecursionError):
            pass
        path.write_bytes(content)
        with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
            ls._list(saved.parent, hashes=False)
            opened = manifests.verify(saved, quiet, hashes=False)
            inspect._print_summary(inspect.summary(saved, opened, "damaged"))
            inspect._print_tensors(opened, None)
        manifests.environment_changes(opened)
        meta = checked_meta(opened.meta)
        if eras := meta.get("data_order"):
            tokens = {each.data: np.zeros(99, dtype=np.uint16) for era in eras for each in era.sets.values()}
            new = SampleStream.begin(1, 8, {"a": ("h", tokens.get("h", np.zeros(99, np.uint16)), 1.0)})
            new.resumed(eras, meta["consumed_samples"])

    return Reader(json_files(valid), read)


@reader
def metadata(folder: Path) -> Reader:
    """DCP's pickled metadata, with the hash that the manifest lists."""
    saved, tensors = _checkpoint(folder)
    return Reader(octets((saved / "data" / ".metadata").read_bytes()), _replaced(saved, "data/.metadata", tensors))


@reader
def stored_tensors(folder: Path) -> Reader:
    """A file of tensors, with the hash that the manifest lists."""
    saved, tensors = _checkpoint(folder)
    name = next(path.name for path in (saved / "data").iterdir() if path.suffix == ".distcp")
    return Reader(octets((saved / "data" / name).read_bytes()), _replaced(saved, f"data/{name}", tensors))


def _replaced(saved: Path, name: str, tensors: dict[str, torch.Tensor]) -> Callable[[bytes], None]:
    path = saved / manifests.FILE_NAME
    whole = json.loads(path.read_bytes())
    del whole["sha256"]

    def read(content: bytes) -> None:
        (saved / name).write_bytes(content)
        entry = {"bytes": len(content), "sha256": manifests.hashlib.sha256(content).hexdigest()}
        edited = whole | {"files": whole["files"] | {name: entry}}
        path.write_text(json.dumps({"sha256": manifests._checksum(edited), **edited}))
        load_tensors(saved, {key: torch.zeros_like(each) for key, each in tensors.items()}, log=quiet)

    return read


@reader
def safetensors(folder: Path) -> Reader:
    """A safetensors file: header and data."""
    _weights(folder)
    return Reader(octets((folder / SINGLE).read_bytes()), _read_weights(folder, SINGLE))


@reader
def safetensors_header(folder: Path) -> Reader:
    """A safetensors file with a header that is still JSON."""
    _weights(folder)
    content = (folder / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    files = json_files(header).map(lambda text: len(text).to_bytes(8, "little") + text + data)
    return Reader(files, _read_weights(folder, SINGLE))


@reader
def weights_index(folder: Path) -> Reader:
    """The index of several safetensors files."""
    _weights(folder, 20)
    name = "model.safetensors.index.json"
    return Reader(json_files(json.loads((folder / name).read_bytes())), _read_weights(folder, name))


@reader
def pickled_weights(folder: Path) -> Reader:
    """A pickled state dict."""
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    valid = path.read_bytes()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for each in load_pickle(path).values():
            each.sum()

    return Reader(octets(valid), read)


def _weights(folder: Path, size: int = 10**6) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0)}
    stored = [Stored(name, tuple(each.shape), each.dtype, each.clone) for name, each in tensors.items()]
    write_weights(folder, stored, size, quiet)


def _read_weights(folder: Path, name: str) -> Callable[[bytes], None]:
    def read(content: bytes) -> None:
        (folder / name).write_bytes(content)
        for each in open_weights(folder, str).values():
            each.read().sum()

    return read
