"""Compilation of the kernels into a shared library. The units (see units.py) are compiled in parallel."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path

from gptlite.kernels.toolchain import BuildError, Compiler, Compilers, cudart, find_cxx
from gptlite.kernels.units import Unit, binding_units, cpu_units, cuda_units
from gptlite.progress import Log

MAX_JOBS = 16
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # memory limit of a container
ERROR_LINES = 3  # lines of compiler output that a BuildError quotes
# Exported symbols. If all were exported, two libraries in a process could use each other's inline functions.
EXPORTS = "{ global: gptlite_*; local: *; };\n"
LINK = ("-shared", "-s", "-Wl,-z,defs", "-Wl,--no-as-needed")


def build(library: Path, cxx: Compiler, nvcc: Compiler | None, log: Log, arch: str = "") -> str:
    """Compile the kernels and their torch ops into the file `library`. Returns the error of nvcc, or "".

    Without `nvcc`, or if it fails, the library has only CPU kernels. Object files are written to a temporary
    folder beside the library. For `arch` see `cuda_units`. Raises BuildError.
    """
    import torch  # imported here, as `build_plain` must work without torch

    home = Path(torch.__file__).parent
    libraries = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        folder, why, objects = Path(name), "", []
        if nvcc:
            units = cuda_units(nvcc, cxx, arch) + cpu_units(cxx) + binding_units(cxx, home / "include", cuda=True)
            try:
                objects = compile_all(units, folder, log, "CPU and CUDA kernels")
                libraries += [str(cudart(nvcc)), "-ldl", "-lrt", "-lpthread"]
            except BuildError as error:
                why, objects = str(error), []
        if not objects:
            units = cpu_units(cxx) + binding_units(cxx, home / "include", cuda=False)
            objects = compile_all(units, folder, log, "CPU kernels")
        link(cxx, objects, libraries, folder, library)
    return why


def build_plain(folder: Path, cxx: Compiler | None = None, log: Log = print) -> Path:
    """Build the CPU kernels as a C library for ctypes, without torch. Raises BuildError."""
    cxx = cxx or find_cxx()
    library = folder / "libgptlite_cpu.so"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as name:
        link(cxx, compile_all(cpu_units(cxx), Path(name), log, "CPU kernels"), [], Path(name), library)
    return library


def jobs_here() -> int:
    """Return the number of parallel compilers: at most one per core, and one per GiB of memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, int(MEMORY_LIMIT.read_text()))
    return max(1, min(MAX_JOBS, len(os.sched_getaffinity(0)), memory // 2**30))


def compile_all(units: list[Unit], folder: Path, log: Log, label: str) -> list[Path]:
    """Compile the units and return their objects. Raises BuildError with the first error lines of a failed unit."""
    jobs = jobs_here()
    units = sorted(units, key=lambda unit: -unit.weight)  # longest first, so that none runs alone at the end
    started = reported = time.monotonic()
    # The compilers end before the pool, which waits for its threads.
    with ThreadPoolExecutor(jobs) as threads, Compilers() as compilers:
        calls = {threads.submit(_compile, unit, folder / f"{unit.label}.o", compilers): unit for unit in units}
        done, total = 0, sum(unit.weight for unit in units)
        try:
            for number, call in enumerate(as_completed(calls), 1):
                call.result()
                done += calls[call].weight
                now = time.monotonic()
                if now - reported >= 5 and number < len(units):
                    reported = now
                    left = timedelta(seconds=round((now - started) * (total - done) / done))
                    log(f"kernels: {label}, {number} of {len(units)} files compiled, ETA {left}")
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return [call.result() for call in calls]


def link(cxx: Compiler, objects: Iterable[Path], libraries: Iterable[str], folder: Path, target: Path) -> None:
    """Link the objects to `target`, which is created atomically. Raises BuildError."""
    exports, linked = folder / "exports.map", folder / target.name
    exports.write_text(EXPORTS)
    command = [*cxx.command, *LINK, f"-Wl,--version-script={exports}", *map(str, objects), *libraries]
    with Compilers() as compilers:
        _run([*command, "-o", str(linked)], "the kernels do not link", compilers)
    os.replace(linked, target)


def _compile(unit: Unit, target: Path, compilers: Compilers) -> Path:
    command = [*unit.command, "-c", str(unit.source), "-o", str(target)]
    _run(command, f"{unit.source.name} does not compile", compilers)
    return target


def _run(command: list[str], failed: str, compilers: Compilers) -> None:
    result = compilers.run(command)
    if result.returncode:
        lines = [line.strip() for line in (result.stderr + result.stdout).splitlines() if line.strip()]
        told = [line for line in lines if "error" in line.lower() or "undefined" in line] or lines
        why = " | ".join(told[:ERROR_LINES]) or f"exit code {result.returncode}"
        raise BuildError(f"{failed} with {command[0]}: {why}")
