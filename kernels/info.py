"""`info`: report of the compilers, the library, and each op's implementation (fused or reference). Compiles nothing.

gptlite kernels info
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gptlite.invocation import command
from gptlite.kernels.cache import known_folders
from gptlite.kernels.fakes import FAKES
from gptlite.kernels.library import LoadedLibrary, Unavailable, compiled, load
from gptlite.kernels.tables import table
from gptlite.kernels.toolchain import BuildError, Compiler, find_cxx, find_nvcc

CPU_ONLY = ("attention", "weight_gradient")  # ops with these prefixes have no CUDA kernel


@dataclass
class Options:
    """Command-line options; there are none."""


def run(options: Options) -> int:
    """Print the tables and return the exit code."""
    library = compiled()
    loaded = load("cpu") if library else _lacking()
    said = f"not compiled yet; `{command('kernels')} build` or the first run with kernels compiles it"
    if library:
        kinds = "CPU and CUDA" if library.record.cuda else "CPU"
        said = f"{library.path.name}: {kinds} kernels, compiled in {library.record.seconds:.0f} s"
    rows = [
        ("machine", f"{platform.system()} {platform.machine()}, torch {torch.__version__}"),
        ("C++ compiler", _found(find_cxx)),
        ("nvcc", _found(find_nvcc)),
        ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
        ("cache", ", ".join(map(str, known_folders()))),
        ("library", said),
    ]
    cpu = products = path_of(loaded, "cpu")
    cuda = path_of(load("cuda") if library else loaded, "cuda")
    if isinstance(loaded, LoadedLibrary):
        sets = "neon" if "neon" in loaded.isa else "baseline, avx2, avx512"
        rows.append(("instruction sets", f"{loaded.isa} used here; compiled for {sets}"))
    if not isinstance(loaded, LoadedLibrary) or "_bf16" not in loaded.isa:
        products = "reference (no AVX512-BF16, nor BF16 of ARM)"
    ops = [("op", "cpu", "cuda")]
    for name in FAKES:
        on_gpu = "reference (kernel only for CPUs)" if name.startswith(CPU_ONLY) else cuda
        ops.append((name, products if name == "weight_gradient" else cpu, on_gpu))
    print(f"{table(rows)}\n\n{table(ops)}")
    return 0


def path_of(loaded: LoadedLibrary | Unavailable | None, device_type: str) -> str:
    """Return the implementation of ops on a device, with the reason. `loaded`: None if nothing is compiled yet."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "- (no GPU)"
    if isinstance(loaded, LoadedLibrary):
        return f"fused ({loaded.isa})" if device_type == "cpu" else "fused"
    return f"reference ({loaded.reason})" if loaded else "fused, once compiled"


def _lacking() -> Unavailable | None:
    try:
        find_cxx()
    except BuildError as error:
        return Unavailable(str(error))
    return None


def _found(find: Callable[[], Compiler]) -> str:
    try:
        return str(find())
    except BuildError as error:
        return f"none ({error})"
