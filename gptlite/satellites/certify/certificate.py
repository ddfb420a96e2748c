"""certificate.json: what was checked of which configuration, with which result, sealed by a checksum of its content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from gptlite.documents import Count, Digest, DocumentError, checked, read_json
from gptlite.errors import ConfigError
from gptlite.files import write_whole

FILE_NAME, PAGE = "certificate.json", "certificate.html"
FOLDER = "certificates"  # where `certify` writes and `train` looks, in the working directory
VERSION = 1


@dataclass(frozen=True)
class Certificate:
    """Content of certificate.json, except the checksum.

    `config` is the configuration that was given, with its data degree, as saved in runs. `rows` are those of the
    stages, `worlds` the reduced layouts in words, `reduced` `{model key: [before, after]}`, `axes` `{axis: [degree,
    reduced degree]}`.
    """

    schema_version: int
    created: str
    name: str
    model: str
    layout: str
    world_size: int
    passed: bool
    overrides: list[str]
    config: dict[str, Any]
    config_digest: str
    model_digest: str
    gptlite_digest: str
    versions: dict[str, str]
    machine: str
    commit: str | None
    seed: int
    axes: dict[str, list[int]]
    worlds: list[str]
    reduced: dict[str, list[Any]]
    blocks: list[int] | None
    rows: list[dict[str, Any]]
    uncovered: list[str]
    seconds: float

    def write(self, folder: Path) -> Path:
        """Write certificate.json in a folder, which is made, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        write_whole(folder / FILE_NAME, json.dumps({"sha256": seal(content), **content}, indent=1) + "\n")
        return folder / FILE_NAME


class _Row(TypedDict):
    stage: str
    passed: bool | None
    words: str
    seconds: float
    details: list[str]
    uncovered: list[str]


class _Content(TypedDict):
    schema_version: Count
    created: str
    name: str
    model: str
    layout: str
    world_size: Count
    passed: bool
    overrides: list[str]
    config: dict[str, Any]
    config_digest: Digest
    model_digest: Digest
    gptlite_digest: Digest
    versions: dict[str, str]
    machine: str
    commit: str | None
    seed: int
    axes: dict[str, list[Count]]
    worlds: list[str]
    reduced: dict[str, list[Any]]
    blocks: list[Count] | None
    rows: list[_Row]
    uncovered: list[str]
    seconds: float


def read(path: Path) -> Certificate:
    """Return the certificate in a file, or in a folder. Raises ConfigError, in one line, if it cannot be read, or if it
    was changed after it was written."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        content = read_json(file, dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; `gptlite certify` writes certificates") from None
    except DocumentError as error:
        raise ConfigError(f"{file} is not a certificate: {error}; certify again") from None
    if content.pop("sha256", None) != seal(content):
        raise ConfigError(f"{file} was altered after it was written: its checksum differs; certify again")
    if (found := content.get("schema_version")) != VERSION:
        raise ConfigError(f"{file} has schema_version {found}, but this gptlite reads {VERSION}; certify again")
    try:
        return Certificate(**checked(content, _Content))
    except (DocumentError, TypeError) as error:
        raise ConfigError(f"{file} is not a certificate: {error}; certify again") from None


def seal(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON value, which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
