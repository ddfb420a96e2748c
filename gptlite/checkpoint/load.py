"""Reading a checkpoint back: its tensors in place, its meta data, its configuration."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptlite.checkpoint import dcp
from gptlite.checkpoint.manifest import DamagedCheckpoint, Manifest, describe, read_file, read_manifest, verify
from gptlite.errors import ConfigError
from gptlite.progress import Log


def load_tensors(
    path: Path, into: dict[str, Tensor], *, strict: bool = True, log: Log = print, verified: bool = False
) -> None:
    """Fills the tensors of `into` from the step folder `path`, in place and bit for bit.

    Every key of `into` must be stored with the same shape and dtype. With `strict`, nothing else may be stored;
    without, the rest is left alone (weights without their optimizer state, say). Nothing is unpickled, and no tensor
    touched, before every byte matched its SHA-256.

    `verified` says that this process has found the folder intact (`find_checkpoint`, `Checkpointer.find`): then the
    files' sizes and the little that is unpickled are checked again, and the tensors are not hashed a second time.

    Raises DamagedCheckpoint for a damaged folder, ConfigError for a checkpoint of another model.
    """
    manifest = verify(path, log, hashes=not verified)
    if verified:
        read_file(path, "data/.metadata")
    _compare(path, manifest, into, strict)
    try:
        dcp.read(path / "data", into, log)
    except (pickle.UnpicklingError, ValueError) as error:
        raise DamagedCheckpoint(path, str(error)) from None


def read_meta(path: Path) -> dict[str, Any]:
    """The `meta` given to Checkpointer.save. Raises DamagedCheckpoint."""
    return read_manifest(path).meta


def read_config(path: Path) -> str:
    """The resolved configuration of the run that wrote the checkpoint, as YAML. Raises DamagedCheckpoint."""
    return read_file(path, "config.yaml").decode("utf-8")


def _compare(path: Path, manifest: Manifest, into: Mapping[str, Tensor], strict: bool) -> None:
    stored, wanted = manifest.tensors, {key: describe(tensor) for key, tensor in into.items()}
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
