"""Detection of the compilers of this machine."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

QUERY_SECONDS, COMPILE_SECONDS = 60.0, 600.0  # time limits of a question such as --version, and of one compilation
WATCH = "read _; kill -9 0"  # returns from `read` when the pipe is closed, and kills its own process group


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


class Compilers:
    """Context manager for compiler processes, which end with the block, and with this process even if it is killed.

    A compiler starts processes of its own, such as cc1plus, which would outlive it. They all belong to the process
    group of a shell that kills the group once a pipe is closed of which only this process holds the writing end.
    """

    def __enter__(self) -> "Compilers":
        try:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", WATCH],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            raise BuildError(f"/bin/sh, which compilers need, does not run: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()

    def run(self, command: Sequence[str], seconds: float = COMPILE_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a command and return its output and exit code. Raises BuildError if it does not start or end in time."""
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=seconds,
                process_group=self._watcher.pid,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{command[0]} did not end within {seconds:.0f} s; repair it, or set CXX (or CUDA_HOME, for nvcc) to "
                "another compiler"
            ) from None
        except OSError as error:
            raise BuildError(f"{command[0]} does not run: {error}") from error


def output_of(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler to ask it for what it knows, and return its output and exit code. Raises BuildError."""
    with Compilers() as compilers:
        return compilers.run(command, QUERY_SECONDS)


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
        for folder in ("lib64", "lib", f"targets/{'sbsa' if os.uname().machine == 'aarch64' else 'x86_64'}-linux/lib"):
            if (root / folder / "libcudart_static.a").is_file():
                return root / folder / "libcudart_static.a"
    raise BuildError(f"no libcudart_static.a in the CUDA toolkit of {nvcc.command[0]}")


def _compiler(*command: str) -> Compiler:
    result = output_of([*command, "--version"])
    if result.returncode or not result.stdout.strip():
        why = (result.stderr or "it prints nothing").strip().splitlines()[0]
        raise BuildError(f"{command[0]} --version fails: {why}")
    return Compiler(command, result.stdout.strip())
