"""Loading of a checkpoint: verification by all ranks, and reading of its tensors (in place) and configuration."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.checkpoint import dcp
from gptlite.checkpoint.manifest import (
    DamagedCheckpoint,
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
from gptlite.documents import DocumentError, decoded
from gptlite.errors import ConfigError
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import ALONE, from_all, from_main, together
from gptlite.parallelism.reduction import PREFIX
from gptlite.progress import Log, counted


def load_tensors(
    path: Path,
    into: dict[str, Tensor],
    *,
    strict: bool = True,
    log: Log = print,
    verified: bool = False,
    mesh: Mesh = ALONE,
) -> None:
    """Fill this rank's parts of the tensors in `into` from the step folder `path`, in place and bit for bit.

    Every key of `into` must be stored with the same global shape and dtype. With `strict`, every stored key must be
    requested by a rank; without it, other stored keys are ignored (e.g. optimizer state when loading weights). Nothing
    is unpickled and no tensor is written before the SHA-256 of every file has matched.

    `verified` states that this process has found the folder intact (`find_checkpoint`, `Checkpointer.find`). Then only
    the file sizes and the file data/.metadata are checked again, and tensors are not hashed a second time.

    All ranks of `mesh` call this and verify together. An exception on one rank is raised on all: DamagedCheckpoint for
    a damaged folder, ConfigError if the keys, shapes or dtypes differ.
    """
    if verified:
        manifest = _of_main(mesh, path, log)
    else:
        manifest = verify_together(path, log, mesh)
    wanted: Entries = {}
    for each in from_all(mesh, lambda: {key: describe(tensor) for key, tensor in into.items()}):
        wanted |= each  # with a pipeline, each rank has the keys of its layers only
    _compare(path, manifest, wanted, strict)
    together(mesh, lambda: dcp.read(path, read_metadata(path, manifest), Parts(into), log))


def whole_tensors(path: Path, log: Log) -> Callable[[str], Tensor]:
    """Return a function that reads the whole tensor of a key from a step folder, without verifying file hashes."""
    manifest = read_manifest(path)
    metadata = read_metadata(path, manifest)

    def read(key: str) -> Tensor:
        entry = manifest.tensors[key]
        tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        dcp.read(path, metadata, Parts({key: tensor}), log)
        return tensor

    return read


def verify_together(folder: Path, log: Log, mesh: Mesh, agree: dist.ProcessGroup | None = None) -> Manifest:
    """Run `manifest.verify` with the files divided among the ranks: one rank would need minutes for a large checkpoint.

    All ranks use the manifest that rank 0 has read. Raises DamagedCheckpoint on all ranks, with the reason of the
    lowest rank that found damage.
    """
    if mesh.world_size == 1:
        return verify(folder, log)
    manifest = _of_main(mesh, folder, log, agree)
    load = [0] * mesh.world_size
    mine = []
    for name, entry in sorted(manifest.files.items(), key=lambda each: -each[1]["bytes"]):
        # Largest files first, each to the rank with the fewest bytes so far. All ranks compute the same assignment.
        reader = load.index(min(load))
        load[reader] += entry["bytes"]
        if reader == mesh.rank:
            mine.append(name)
    from_all(mesh, lambda: check_hashes(folder, manifest, mine, log), agree)
    return manifest


def _of_main(mesh: Mesh, folder: Path, log: Log, agree: dist.ProcessGroup | None = None) -> Manifest:
    """Return rank 0's manifest, whose files rank 0 has checked except for their hashes, on every rank."""
    return Manifest(**from_main(mesh, lambda: vars(verify(folder, log, hashes=False)), agree))


def read_config(path: Path) -> str:
    """Return the resolved configuration of the run that wrote the checkpoint, as YAML. Raises DamagedCheckpoint."""
    try:
        return decoded(read_file(path, "config.yaml"))
    except DocumentError as error:
        raise DamagedCheckpoint(path, f"config.yaml: {error}") from None


def _compare(path: Path, manifest: Manifest, wanted: Entries, strict: bool) -> None:
    stored = manifest.tensors
    differing = [key for key in wanted if key in stored and stored[key] != wanted[key]]
    missing = [key for key in wanted if key not in stored]
    # A reduction's state is loaded by a call of its own, and a run may drop it.
    unexpected = [key for key in stored if key not in wanted and not key.startswith(PREFIX)] if strict else []
    keys = differing + missing + unexpected
    if not keys:
        return
    there, here = in_words(stored.get(keys[0])), in_words(wanted.get(keys[0]))
    fix = "set model.* and optimizer as in its config.yaml, or start anew in another run.dir"
    if any(key.endswith(".exp_avg") and f"{key.removesuffix('exp_avg')}momentum_buffer" in stored for key in missing):
        # Muon updated every matrix, embeddings included, before AdamW's parameters could be named.
        fix = "set optimizer.adamw_names as in its config.yaml, or to null if it has no such key"
    more = f" (and {counted(len(keys) - 1, 'other mismatch')})" if len(keys) > 1 else ""
    raise ConfigError(
        f"checkpoint {path} does not match this run: {keys[0]} is {there} there, {here} here{more}; {fix}"
    )
