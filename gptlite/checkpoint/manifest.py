"""MANIFEST.json: the required contents of a checkpoint folder. It is written last and checked before loading.

torch is imported only to describe tensors and this machine, so that listing checkpoints does not import it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Required, TypedDict

import gptlite
from gptlite.checkpoint.store import step_of
from gptlite.documents import Count, Digest, DocumentError, Matching, checked, read_bytes, read_json
from gptlite.errors import ConfigError
from gptlite.files import open_regular, write_synced
from gptlite.parallelism.layout import ONE_RANK
from gptlite.parallelism.messages import passed_on
from gptlite.progress import Log, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FILE_NAME = "MANIFEST.json"
FORMAT_VERSION = 1
MOST_THREADS = 8  # threads that hash files
Entries = dict[str, dict[str, Any]]


@passed_on
class DamagedCheckpoint(ConfigError):
    """Error for a checkpoint folder that differs from its manifest. `reason` names the file and the problem."""

    def __init__(self, folder: Path, reason: str):
        super().__init__(f"checkpoint {folder} cannot be used: {reason}; use another one")
        self.folder, self.reason = folder, reason

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        # For transfer between ranks. By default, pickle passes only the message to the constructor.
        return type(self), (self.folder, self.reason)


@dataclass(frozen=True)
class Manifest:
    """Content of MANIFEST.json, except the checksum of that content.

    `meta` comes from the caller (step, tokens, ...). `environment` describes the machine and the versions. `files` maps
    a path relative to the folder to the file's size in bytes and SHA-256. `tensors` maps a key to the global shape and
    the dtype.
    """

    format_version: int
    created: str
    meta: dict[str, Any]
    environment: dict[str, Any]
    files: Entries
    tensors: Entries


class _Meta(TypedDict, total=False):
    step: Required[Count]
    consumed_samples: Count
    tokens: Count
    best_val_loss: float | None
    evaluated_step: int | None
    data_identity: dict[str, Any]


class _Environment(TypedDict, total=False):
    layout: str
    gptlite: str
    torch: str
    python: str
    platform: str
    instruction_set: str
    threads: Count
    gpu: str | None
    cuda: str | None


class _File(TypedDict):
    bytes: Count
    sha256: Digest


class _Tensor(TypedDict):
    shape: list[Count]
    dtype: Annotated[str, Matching(r"bool|[a-z]{1,20}[0-9]{1,3}(_\w{1,20})?", "a dtype")]


class _Content(TypedDict):
    created: str
    meta: _Meta
    environment: _Environment
    files: dict[str, _File]
    tensors: dict[str, _Tensor]


def describe(tensor: Tensor) -> dict[str, Any]:
    """Return the entry of a tensor in `Manifest.tensors`. For a DTensor it has the global shape."""
    return spell(tensor.shape, tensor.dtype)


def spell(shape: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
    """Return the entry of a shape and a dtype in `Manifest.tensors`."""
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def in_words(entry: dict[str, Any] | None) -> str:
    """Return e.g. `float32 [7, 4]` for an entry of `Manifest.tensors`, or `absent` for None."""
    return f"{entry['dtype']} {entry['shape']}" if entry else "absent"


def environment(layout: str = ONE_RANK) -> dict[str, Any]:
    """Return the properties of the layout, software and machine that affect floating-point results to the last bit."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "layout": layout,
        "gptlite": gptlite.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
    }


def environment_changes(manifest: Manifest, layout: str = ONE_RANK) -> list[str]:
    """Return the differences from the environment in a manifest, e.g. "threads: 8 then, 4 now".

    If there are none, resuming on a CPU without trainer.compile is bit-exact.
    """
    then, now = {"layout": ONE_RANK} | manifest.environment, environment(layout)
    keys = [*now, *(key for key in then if key not in now)]
    return [f"{key}: {then.get(key)} then, {now.get(key)} now" for key in keys if then.get(key) != now.get(key)]


def write_manifest(
    folder: Path, tensors: Entries, written: Entries, meta: dict[str, Any], layout: str = ONE_RANK
) -> None:
    """Write the manifest of all files below `folder`, after hashing and syncing them.

    `tensors` has the entries of all ranks' tensors, `written` those of the files that ranks have already hashed.
    Raises TypeError if `meta` is not JSON, OSError if the disk is full or fails, or if a rank's file is missing or has
    another size.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, entry in written.items():
        if name not in paths or paths[name].stat().st_size != entry["bytes"]:
            raise OSError(f"{folder / name} differs from what its rank wrote: all ranks must share one file system")
    rest: Entries = {}
    for name in paths.keys() - written.keys():
        with open(paths[name], "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        rest[name] = {"bytes": paths[name].stat().st_size, "sha256": digest}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        meta=meta,
        environment=environment(layout),
        files={name: (written | rest)[name] for name in paths},
        tensors=tensors,
    )
    content = asdict(manifest)
    write_synced(folder / FILE_NAME, json.dumps({"sha256": _checksum(content), **content}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Return a step folder's manifest after checking its checksum. No other file is read. Raises DamagedCheckpoint."""
    try:
        content = read_json(folder / FILE_NAME, dict[str, Any])
        checksum = content.pop("sha256")
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, f"{FILE_NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{FILE_NAME}: {error.strerror}") from None
    except ValueError as error:
        raise DamagedCheckpoint(folder, f"{FILE_NAME} is not a manifest: {error}") from None
    except KeyError:
        raise DamagedCheckpoint(folder, f"{FILE_NAME} is not a manifest: it has no sha256") from None
    if checksum != _checksum(content):
        raise DamagedCheckpoint(folder, f"{FILE_NAME} was altered: its checksum differs")
    if (found := content.get("format_version")) != FORMAT_VERSION:
        raise DamagedCheckpoint(
            folder, f"its format_version is {found}, but this gptlite reads {FORMAT_VERSION}: update gptlite"
        )
    # A valid checksum guarantees neither types, nor that no file is outside the folder.
    try:
        manifest = Manifest(**checked(content, _Content))
    except (DocumentError, TypeError) as error:
        raise DamagedCheckpoint(folder, f"{FILE_NAME} is not a manifest: {error}") from None
    if "data/.metadata" not in manifest.files or not all(map(_inside, manifest.files)):
        raise DamagedCheckpoint(
            folder, f"{FILE_NAME} is not a manifest: data/.metadata is not in files, or a name leaves the folder"
        )
    return manifest


def _inside(name: str) -> bool:
    """Return True if a relative path stays within its folder and is short enough for common file systems."""
    parts = name.split("/")
    return "\0" not in name and len(name) < 1000 and all(part not in ("", "..") and len(part) < 256 for part in parts)


def verify(folder: Path, log: Log, *, hashes: bool = True) -> Manifest:
    """Check the size and, with `hashes`, the SHA-256 of every file against the manifest. Raises DamagedCheckpoint."""
    manifest = read_manifest(folder)
    if step_of(folder) not in (None, step := manifest.meta["step"]):  # a copy may have any other name
        raise DamagedCheckpoint(folder, f"{FILE_NAME} belongs to step {step}")
    # Sizes first, to find a missing or truncated file before reading gigabytes.
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(folder, f"{name} is missing")
        if (size := path.stat().st_size) != entry["bytes"]:
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes, but its manifest lists {entry['bytes']}")
    if hashes:
        check_hashes(folder, manifest, list(manifest.files), log, threads=min(MOST_THREADS, os.cpu_count() or 1))
    return manifest


def check_hashes(folder: Path, manifest: Manifest, names: Sequence[str], log: Log, threads: int = 1) -> None:
    """Compare the SHA-256 of the files `names`, read from disk, with the manifest. Raises DamagedCheckpoint."""
    total = sum(manifest.files[name]["bytes"] for name in names)
    progress = Progress(f"checkpoint: verifying {folder.name}", total, log)

    def check(name: str) -> None:
        try:
            digest = _hash(folder / name, progress)
        except OSError as error:
            raise DamagedCheckpoint(folder, f"{name} cannot be read: {error.strerror}") from None
        if digest != manifest.files[name]["sha256"]:
            raise DamagedCheckpoint(folder, f"{name} has damaged bytes: its SHA-256 differs")

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(check, names):
            pass


def read_file(folder: Path, name: str) -> bytes:
    """Return the content of a small file of a step folder, checked by its hash. Raises DamagedCheckpoint."""
    entry = read_manifest(folder).files.get(name)
    try:
        content = read_bytes(folder / name)
    except DocumentError as error:
        raise DamagedCheckpoint(folder, f"{name}: {error}") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{name}: {error.strerror}") from None
    if entry is None or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise DamagedCheckpoint(folder, f"{name} has damaged bytes: its SHA-256 differs")
    return content


def _checksum(content: dict[str, Any]) -> str:
    # Sorted, so that the checksum does not depend on the order of the keys in the file.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash(path: Path, progress: Progress) -> str:
    """Return the SHA-256 of a file, read from disk: cached pages are dropped first."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(max(1, min(path.stat().st_size, 1 << 20))))
    with open_regular(path, buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress.add(count)
    return digest.hexdigest()
