"""Digests of the source files that a model and a run are made of."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType

import torch

import gptlite
import gptlite.kernels
from gptlite.config.plugins import INCLUDED
from gptlite.config.schema import Config
from gptlite.models.registry import spec_of
from gptlite.satellites.certify.shrink import built

SUFFIXES = (".py", ".h", ".cpp", ".cu", ".cuh")


def model_digest(config: Config) -> str:
    """Return the SHA-256 of the files that define the classes of a model, its spec and configuration, and of the
    configuration's plug-ins, with all files of those that are packages."""
    spec = spec_of(config.model)
    classes = {type(each) for each in built(spec, config.model).modules()} | {type(spec), type(config.model)}
    names = {base.__module__ for each in classes for base in each.__mro__} | set(config.plugins)
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return _digest(path for module in found if not _foreign(module) for path in _files(module))


def gptlite_digest() -> str:
    """Return the SHA-256 of gptlite's source that a run computes with: the core, the plug-ins that come with it, and
    the kernels."""
    package, kernels = (Path(each.__file__ or "").parent for each in (gptlite, gptlite.kernels))
    kept = {name.rpartition(".")[2] for name in INCLUDED}
    paths = {path for folder in (package, kernels) for path in folder.rglob("*") if path.suffix in SUFFIXES}

    def counts(path: Path) -> bool:
        parts = path.relative_to(package if path.is_relative_to(package) else kernels).parts
        return parts[0] not in ("commands", "start", "template") and (parts[0] != "satellites" or parts[1] in kept)

    return _digest(path for path in paths if counts(path))


def versions(config: Config) -> dict[str, str]:
    """Return the versions of Python, torch, gptlite, and of the packages that a model's modules come from."""
    installed = {"python": sys.version.split()[0], "torch": torch.__version__, "gptlite": gptlite.__version__}
    distributions = packages_distributions()
    for module in built(spec_of(config.model), config.model).modules():
        top = type(module).__module__.partition(".")[0]
        if top in distributions and top not in installed:
            installed[top] = version(distributions[top][0])
    return installed


def commit(folder: Path) -> str | None:
    """Return the commit of a Git work tree, with `+` if files differ from it; None outside of one."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if done.returncode else done.stdout.strip()

    found = git("rev-parse", "HEAD")
    return found and found + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _foreign(module: ModuleType) -> bool:
    """Return True for torch and the standard library, whose versions are recorded instead."""
    file = getattr(module, "__file__", None)
    standard = Path(sysconfig.get_paths()["stdlib"])
    inside = file and Path(file).is_relative_to(standard) and "site-packages" not in Path(file).parts
    return not file or bool(inside) or module.__name__.partition(".")[0] == "torch"


def _files(module: ModuleType) -> list[Path]:
    file = Path(module.__file__ or "")
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


def _digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files' contents, in the order of these, as folders differ between machines."""
    hashes = sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()})
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()
