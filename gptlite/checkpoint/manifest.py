"""MANIFEST.json: what a checkpoint folder must hold. It is written last and checked before anything is loaded."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gptlite
from gptlite.errors import ConfigError
from gptlite.files import write_synced
from gptlite.progress import Log, Progress

FILE_NAME = "MANIFEST.json"
FORMAT_VERSION = 1


class DamagedCheckpoint(ConfigError):
    """A checkpoint folder that is not what its manifest says. `reason` names the file and what is wrong with it."""

    def __init__(self, folder: Path, reason: str):
        super().__init__(f"checkpoint {folder} cannot be used: {reason}; take another one")
        self.reason = reason


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json, beside a checksum of itself.

    `meta` is the caller's (step, tokens, ...). `environment` is where the numbers were made. `files` maps a path
    relative to the folder to its size in bytes and SHA-256, `tensors` a key to its global shape and dtype.
    """

    format_version: int
    created: str
    meta: dict[str, Any]
    environment: dict[str, Any]
    files: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]


def describe(tensor: Tensor) -> dict[str, Any]:
    """Global shape and dtype as the manifest spells them."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def environment() -> dict[str, Any]:
    """Everything besides the layout that decides the last bit of a floating-point result."""
    gpu = torch.cuda.is_available()
    return {
        "gptlite": gptlite.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
    }


def environment_changes(manifest: Manifest) -> list[str]:
    """What differs from where the checkpoint was written, as "threads: 8 then, 4 now". Empty: resuming is bit-exact."""
    then, now = manifest.environment, environment()
    keys = [*now, *(key for key in then if key not in now)]
    return [f"{key}: {then.get(key)} then, {now.get(key)} now" for key in keys if then.get(key) != now.get(key)]


def write_manifest(folder: Path, tensors: Mapping[str, Tensor], meta: dict[str, Any], log: Log) -> None:
    """Hashes every file below `folder`, brings each to the disk and writes the manifest over them.

    Raises TypeError if `meta` is not JSON, OSError if the disk is full or fails.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    progress = Progress("checkpoint: hashing", sum(path.stat().st_size for path in paths), log)
    files = {}
    for path in paths:
        size, digest = _hash(path, progress, sync=True)
        files[path.relative_to(folder).as_posix()] = {"bytes": size, "sha256": digest}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        meta=meta,
        environment=environment(),
        files=files,
        tensors={key: describe(tensor) for key, tensor in tensors.items()},
    )
    content = asdict(manifest)
    write_synced(folder / FILE_NAME, json.dumps({"sha256": _checksum(content), **content}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step folder, itself intact; the files are not looked at. Raises DamagedCheckpoint."""
    try:
        content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        checksum = content.pop("sha256")
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, f"{FILE_NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{FILE_NAME}: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise DamagedCheckpoint(folder, f"{FILE_NAME} is not a manifest") from None
    if checksum != _checksum(content):
        raise DamagedCheckpoint(folder, f"{FILE_NAME} was altered: its checksum differs")
    if content["format_version"] != FORMAT_VERSION:
        found = content["format_version"]
        raise DamagedCheckpoint(folder, f"its format_version is {found}, this gptlite reads {FORMAT_VERSION}")
    return Manifest(**content)


def verify(folder: Path, log: Log, *, hashes: bool = True) -> Manifest:
    """Checks that every file is there with its size and, with `hashes`, every byte. Raises DamagedCheckpoint."""
    manifest = read_manifest(folder)
    # Sizes first: a missing or truncated file is known before gigabytes are read.
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(folder, f"{name} is missing")
        if (size := path.stat().st_size) != entry["bytes"]:
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes, its manifest says {entry['bytes']}")
    if hashes:
        total = sum(entry["bytes"] for entry in manifest.files.values())
        progress = Progress(f"checkpoint: verifying {folder.name}", total, log)
        for name, entry in manifest.files.items():
            try:
                _, digest = _hash(folder / name, progress)
            except OSError as error:
                raise DamagedCheckpoint(folder, f"{name} cannot be read: {error.strerror}") from None
            if digest != entry["sha256"]:
                raise DamagedCheckpoint(folder, f"{name} has damaged bytes: its SHA-256 differs")
    return manifest


def read_file(folder: Path, name: str) -> bytes:
    """A small file of a step folder, checked against the manifest. Raises DamagedCheckpoint."""
    entry = read_manifest(folder).files.get(name)
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{name}: {error.strerror}") from None
    if entry is None or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise DamagedCheckpoint(folder, f"{name} has damaged bytes: its SHA-256 differs")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash(path: Path, progress: Progress, *, sync: bool = False) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file, brought to the disk first if `sync`."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(1 << 22))
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            progress.add(count)
    return size, digest.hexdigest()
