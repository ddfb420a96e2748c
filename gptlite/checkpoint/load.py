"""Reading a checkpoint back: verified by all ranks, its tensors in place, its meta data, its configuration."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.checkpoint import dcp
from gptlite.checkpoint.manifest import (
    Entries,
    Manifest,
    check_hashes,
    describe,
    in_words,
    read_file,
    read_manifest,
    verify,
)
from gptlite.checkpoint.metadata import read_metadata
from gptlite.checkpoint.parts import Parts
from gptlite.errors import ConfigError
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import ALONE, from_all, from_main, together
from gptlite.progress import Log


def load_tensors(
    path: Path,
    into: dict[str, Tensor],
    *,
    strict: bool = True,
    log: Log = print,
    verified: bool = False,
    mesh: Mesh = ALONE,
) -> None:
    """Fills the tensors of `into` from the step folder `path`, in place and bit for bit: of each, this rank's part.

    Every key of `into` must be stored with the same global shape and dtype. With `strict`, nothing may be stored that
    no rank asks for; without, the rest is left alone (weights without their optimizer state, say). Nothing is
    unpickled, and no tensor touched, before every byte matched its SHA-256.

    `verified` says that this process has found the folder intact (`find_checkpoint`, `Checkpointer.find`): then the
    files' sizes and the little that is unpickled are checked again, and the tensors are not hashed a second time.

    To be called by all ranks of `mesh`, which verify together. What one rank raises, all raise: DamagedCheckpoint for a
    damaged folder, ConfigError for a checkpoint of another model.
    """
    if verified:
        manifest = from_main(mesh, lambda: verify(path, log, hashes=False))
    else:
        manifest = verify_together(path, log, mesh)
    wanted: Entries = {}
    for each in from_all(mesh, lambda: {key: describe(tensor) for key, tensor in into.items()}):
        wanted |= each
    _compare(path, manifest, wanted, strict)
    together(mesh, lambda: dcp.read(path, read_metadata(path, manifest), Parts(into), log))


def whole_tensors(path: Path, log: Log) -> Callable[[str], Tensor]:
    """Reads whole tensors of a step folder by their keys. Only where their bytes lie is verified here."""
    manifest = read_manifest(path)
    metadata = read_metadata(path, manifest)

    def read(key: str) -> Tensor:
        entry = manifest.tensors[key]
        tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        dcp.read(path, metadata, Parts({key: tensor}), log)
        return tensor

    return read


def verify_together(folder: Path, log: Log, mesh: Mesh, agree: dist.ProcessGroup | None = None) -> Manifest:
    """`manifest.verify` with the files shared among the ranks, for one reads a large checkpoint for minutes.

    Rank 0's reading of the manifest counts. Raises DamagedCheckpoint, on all ranks what the first of them found.
    """
    if mesh.world_size == 1:
        return verify(folder, log)
    manifest = from_main(mesh, lambda: verify(folder, log, hashes=False), agree)
    load = [0] * mesh.world_size
    mine = []
    for name, entry in sorted(manifest.files.items(), key=lambda each: -each[1]["bytes"]):
        reader = load.index(min(load))
        load[reader] += entry["bytes"]
        if reader == mesh.rank:
            mine.append(name)
    from_all(mesh, lambda: check_hashes(folder, manifest, mine, log), agree)
    return manifest


def not_finite(tensor: Tensor) -> str:
    """`holds 3 numbers that are NaN or infinite, the first at [0, 7]`; empty where it holds none."""
    if tensor.isfinite().all():
        return ""
    places = (~tensor.isfinite()).nonzero()
    return f"holds {len(places):,} numbers that are NaN or infinite, the first at {places[0].tolist()}"


def read_config(path: Path) -> str:
    """The resolved configuration of the run that wrote the checkpoint, as YAML. Raises DamagedCheckpoint."""
    return read_file(path, "config.yaml").decode("utf-8")


def _compare(path: Path, manifest: Manifest, wanted: Entries, strict: bool) -> None:
    stored = manifest.tensors
    differing = [key for key in wanted if key in stored and stored[key] != wanted[key]]
    missing = [key for key in wanted if key not in stored]
    unexpected = [key for key in stored if key not in wanted] if strict else []
    keys = differing + missing + unexpected
    if not keys:
        return
    there, here = in_words(stored.get(keys[0])), in_words(wanted.get(keys[0]))
    more = f" ({len(keys) - 1} more keys differ)" if len(keys) > 1 else ""
    raise ConfigError(
        f"checkpoint {path} is of another model: {keys[0]} is {there} there, {here} here{more}; "
        "set model.* and optimizer as in its config.yaml, or start anew in another run.dir"
    )
