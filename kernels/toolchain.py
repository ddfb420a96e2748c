"""Detection of the compilers of this machine."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class BuildError(Exception):
    """Error with the one-line reason why the kernels cannot be compiled or loaded."""


@dataclass(frozen=True)
class Compiler:
    """Compiler command, and its full --version output, which is part of the hash in a cached library's name."""

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        said = [line for line in self.version.splitlines() if "release" in line] or self.version.splitlines()[:1]
        return f"{' '.join(self.command)} ({said[0].strip()})"

    def accepts(self, flags: Iterable[str]) -> bool:
        """Return True if the compiler supports these flags."""
        return output_of([*self.command, *flags, "-x", "c++", "-fsyntax-only", os.devnull]).returncode == 0

    def compiles_for(self, arch: str) -> bool:
        """Return True if nvcc supports a GPU architecture, such as "90"."""
        return f"sm_{arch}" in output_of([*self.command, "--list-gpu-code"]).stdout.split()


def output_of(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and exit code. Raises BuildError if it cannot be started."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error


def find_cxx() -> Compiler:
    """Return $CXX, or the first of c++, g++ and clang++ on PATH. Raises BuildError."""
    chosen = os.environ.get("CXX", "").strip()
    for command in [shlex.split(chosen)] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return _compiler(*command)
    if chosen:
        raise BuildError(f"the compiler CXX={chosen} does not exist; set CXX to a C++ compiler, or unset it")
    raise BuildError("no C++ compiler: neither c++, g++ nor clang++ is on PATH, and CXX is not set")


def find_nvcc() -> Compiler:
    """Return nvcc from CUDA_HOME if it is set, else from PATH. Raises BuildError."""
    home = os.environ.get("CUDA_HOME", "").strip()
    path = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")
    if not path:
        raise BuildError(f"no nvcc in CUDA_HOME={home}/bin" if home else "no nvcc on PATH, and CUDA_HOME is not set")
    return _compiler(path)


def cudart(nvcc: Compiler) -> Path:
    """Return the path of CUDA's static runtime library, found with nvcc. Raises BuildError."""
    said = output_of([*nvcc.command, "--dryrun", "-c", "-x", "cu", os.devnull]).stderr
    top = [line.partition("TOP=")[2].strip() for line in said.splitlines() if "TOP=" in line]
    roots = [Path(root) for root in top] + [Path(nvcc.command[0]).resolve().parents[1]]
    for root in roots:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if (root / folder / "libcudart_static.a").is_file():
                return root / folder / "libcudart_static.a"
    raise BuildError(f"no libcudart_static.a in the CUDA toolkit of {nvcc.command[0]}")


def _compiler(*command: str) -> Compiler:
    result = output_of([*command, "--version"])
    if result.returncode or not result.stdout.strip():
        why = (result.stderr or "it prints nothing").strip().splitlines()[0]
        raise BuildError(f"{command[0]} --version fails: {why}")
    return Compiler(command, result.stdout.strip())
