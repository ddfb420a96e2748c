"""The compilers of this machine."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class BuildError(Exception):
    """Why the kernels cannot be compiled or loaded here, in one line."""


@dataclass(frozen=True)
class Compiler:
    """A command that compiles, and the whole text of its --version, which is part of a cached library's name."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        said = [line for line in self.version.splitlines() if "release" in line] or self.version.splitlines()[:1]
        return f"{' '.join(self.command)} ({said[0].strip()})"

    def accepts(self, flags: Iterable[str]) -> bool:
        """Whether it knows these flags."""
        probe = [*self.command, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    def compiles_for(self, arch: str) -> bool:
        """Of nvcc: whether it knows a GPU's architecture, "90"."""
        known = subprocess.run([*self.command, "--list-gpu-code"], capture_output=True, text=True, check=False)
        return f"sm_{arch}" in known.stdout.split()


def find_cxx() -> Compiler:
    """$CXX, or the first of c++, g++ and clang++ on PATH. Raises BuildError."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        command = shlex.split(chosen)
        if not shutil.which(command[0]):
            raise BuildError(f"the compiler CXX={chosen} is not there")
        return Compiler(tuple(command), _version(command))
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return Compiler((name,), _version([name]))
    raise BuildError("no C++ compiler: neither c++, g++ nor clang++ is on PATH, and CXX is not set")


def find_nvcc() -> Compiler:
    """The nvcc of CUDA_HOME, or the one on PATH. Raises BuildError."""
    home = os.environ.get("CUDA_HOME", "").strip()
    path = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")
    if not path:
        raise BuildError(f"no nvcc in CUDA_HOME={home}/bin" if home else "no nvcc on PATH, and CUDA_HOME is not set")
    return Compiler((path,), _version([path]))


def cudart(nvcc: Compiler) -> Path:
    """CUDA's static runtime library, whose folder nvcc tells. Raises BuildError."""
    result = subprocess.run(
        [*nvcc.command, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    top = [line.partition("TOP=")[2].strip() for line in result.stderr.splitlines() if "TOP=" in line]
    roots = [Path(root) for root in top] + [Path(nvcc.command[0]).resolve().parents[1]]
    for root in roots:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if (root / folder / "libcudart_static.a").is_file():
                return root / folder / "libcudart_static.a"
    raise BuildError(f"no libcudart_static.a beside {nvcc.command[0]}")


def _version(command: list[str]) -> str:
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if result.returncode or not result.stdout.strip():
        raise BuildError(
            f"{command[0]} --version fails: {(result.stderr or 'it says nothing').strip().splitlines()[0]}"
        )
    return result.stdout.strip()
