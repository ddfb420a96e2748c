"""Reading a checkpoint back: its tensors in place, its meta data, its configuration."""

import pickle
from pathlib import Path
from typing import Any

from torch import Tensor

from gptlite.checkpoint import dcp
from gptlite.checkpoint.manifest import DamagedCheckpoint, Entries, Manifest, describe, read_file, read_manifest, verify
from gptlite.checkpoint.verify import verify_together
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
    together(mesh, lambda: _read(path, into, log))


def _read(path: Path, into: dict[str, Tensor], log: Log) -> None:
    read_file(path, "data/.metadata")
    files = [name.removeprefix("data/") for name in read_manifest(path).files if name.startswith("data/")]
    try:
        dcp.read(path / "data", into, log, files)
    except (pickle.UnpicklingError, ValueError) as error:
        raise DamagedCheckpoint(path, str(error)) from None


def not_finite(tensor: Tensor) -> str:
    """`holds 3 numbers that are NaN or infinite, the first at [0, 7]`; empty where it holds none."""
    if tensor.isfinite().all():
        return ""
    places = (~tensor.isfinite()).nonzero()
    return f"holds {len(places):,} numbers that are NaN or infinite, the first at {places[0].tolist()}"


def read_meta(path: Path) -> dict[str, Any]:
    """The `meta` given to Checkpointer.save. Raises DamagedCheckpoint."""
    return read_manifest(path).meta


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
    key, more = keys[0], f" ({len(keys) - 1} more keys differ)" if len(keys) > 1 else ""
    raise ConfigError(
        f"checkpoint {path} is of another model: {key} is {_spell(stored.get(key))} there, {_spell(wanted.get(key))} "
        f"here{more}; set model.* and optimizer as in its config.yaml, or start anew in another run.dir"
    )


def _spell(entry: dict[str, Any] | None) -> str:
    return f"{entry['dtype']} {entry['shape']}" if entry else "absent"
