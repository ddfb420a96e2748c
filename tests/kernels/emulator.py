"""CUDA sources compiled to run on the CPU, each access to memory checked (kernels/emu)."""

import _ctypes
import ctypes
import dataclasses
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernels.backends import Backend
from kernels.library import load
from kernels.memory import Memory

KERNELS = Path(__file__).parents[2] / "kernels"
Change = tuple[str, str, str]  # a file under kernels/, text that stands in it once, and what to put there

_COMMON = ("-std=c++17", "-g", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas")
_EMULATOR = (*_COMMON, "-O2")
# Not optimized: half the time to compile, and no access is merged with another. emu/hooks.cpp has what this calls.
_KERNEL = (
    *(*_COMMON, "-O0", "-x", "c++", "-DGPTLITE_EMU", "-fsanitize=thread"),
    "-fsanitize=alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift-exponent",
)
_LINK = ("-shared", "-Wl,-Bsymbolic,--no-undefined,--wrap=memcpy,--wrap=memset", "-lm", "-ldl")
_KEEP = 7 * 24 * 3600  # seconds that a compiled file is kept unused

READ_ONLY, WRITABLE, FRESH = 0, 1, 2  # of memory lent to kernels; fresh: of no contents until written


class EmulatorError(AssertionError):
    """What a kernel did wrong, and where."""


def build_emulated(folder: Path, sources: Iterable[Path] | None = None, changes: Sequence[Change] = ()) -> Path:
    """The library of `sources` (None: kernels/cuda/*.cu), in `folder`, compiled where it isn't there yet.

    With `changes` made to a copy of the sources, what is compiled for them is not kept; the library is the caller's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _drop_unused(folder)
    sources = sorted((KERNELS / "cuda").glob("*.cu")) if sources is None else list(sources)
    if not changes:
        return _build(KERNELS, sources, folder, folder)
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "kernels"
        shutil.copytree(KERNELS, tree, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for name, old, new in changes:
            text = (tree / name).read_text()
            assert text.count(old) == 1, f"{name} has {text.count(old)} times:\n{old}"
            (tree / name).write_text(text.replace(old, new))
        return _build(tree, [tree / each.relative_to(KERNELS) for each in sources], folder, Path(temporary))


def _build(tree: Path, sources: list[Path], folder: Path, new: Path) -> Path:
    """The library in `folder`, of objects that are there; kernels that aren't are made in `new`."""
    headers = [*tree.glob("include/*.h"), *tree.glob("emu/*.h"), *tree.glob("cuda/*.cuh")]
    includes = (f"-I{tree / 'cuda'}", f"-I{tree / 'include'}")
    units = [(source, _KERNEL) for source in sources]
    units += [(source, _EMULATOR) for source in sorted((tree / "emu").glob("*.cpp"))]
    units += [(source, _EMULATOR) for source in sorted((tree / "cpu").glob("*workspace.cpp"))]

    def compiled(unit: tuple[Path, tuple[str, ...]]) -> Path:
        source, flags = unit
        seen = headers if source.suffix == ".cu" else [path for path in headers if path.suffix == ".h"]
        name = f"{source.stem}-{_digest(flags, [source, *seen])}.o"
        target = (new if source.suffix == ".cu" and not (folder / name).exists() else folder) / name
        return _made(target, ["g++", *flags, *includes, "-c", str(source)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    library = folder / f"emulated-{_digest([*_LINK, *(each.name for each in objects)], [])}.so"
    return _made(library, ["g++", *map(str, objects), *_LINK])


def _made(target: Path, command: list[str]) -> Path:
    """The file that the command makes; several processes may make it at once."""
    if target.exists():
        os.utime(target)
        return target
    temporary = target.with_name(f"{target.name}.{os.getpid()}.{time.monotonic_ns()}")
    result = subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    temporary.replace(target)
    return target


def _digest(flags: Iterable[str], paths: Iterable[Path]) -> str:
    digest = hashlib.sha256("\0".join([_version(), *flags]).encode())
    for path in sorted(paths, key=lambda each: (each.parent.name, each.name)):
        digest.update(f"\0{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _drop_unused(folder: Path) -> None:
    for path in folder.glob("*-*"):
        if path.is_file() and time.time() - path.stat().st_mtime > _KEEP:
            path.unlink(missing_ok=True)


class Device:
    """The emulated device of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.gptlite_emu_error.restype = ctypes.c_char_p
        library.gptlite_emu_register.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.gptlite_emu_seed.argtypes = [ctypes.c_uint64]
        library.gptlite_emu_device.argtypes = [ctypes.c_int, ctypes.c_int64]

    def reset(self, seed: int) -> None:
        """Forgets lent memory and errors; blocks, warps and threads take turns in an order drawn from the seed."""
        self.library.gptlite_emu_reset()
        self.library.gptlite_emu_seed(seed)

    def lend(self, pointer: int, size: int, mode: int) -> None:
        """Memory that kernels may use until the reset, `size` in bytes."""
        assert self.library.gptlite_emu_register(pointer, size, mode), "overlaps with memory that is lent already"

    def shape(self, processors: int = 3, shared: int = 227 * 1024) -> None:
        """How many processors launchers see, and the most shared memory of a block in bytes."""
        self.library.gptlite_emu_device(processors, shared)

    def check(self) -> None:
        """Raises EmulatorError."""
        error = self.library.gptlite_emu_error().decode()
        if error:
            raise EmulatorError(error)


@dataclass(frozen=True)
class Emulated(Backend):
    """The CUDA kernels on the emulated device, scheduled by `seed`."""

    seed: int = 0

    def of_case(self, name: str) -> "Emulated":
        """With an order of threads and blocks of the case's own."""
        return dataclasses.replace(self, seed=zlib.crc32(f"{self.seed}-{name}".encode()))

    def _run(self, function: ctypes._CFuncPtr, arguments: list, memory: Memory) -> int:
        device = Device(self.library)
        device.reset(self.seed)
        for buffer in memory.buffers:
            empty = buffer.written and bool((buffer.raw == 0xFF).all())
            device.lend(buffer.pointer, buffer.size, FRESH if empty else WRITABLE if buffer.written else READ_ONLY)
        status = function(*arguments)
        device.check()
        return status


def emulated(path: Path, seed: int = 0) -> Emulated:
    """The backend of a library that `build_emulated` made."""
    return Emulated("emulated", load(path), "gptlite_cuda_", seed=seed)


def unload(library: ctypes.CDLL) -> None:
    """Gives back a library's memory; none of its functions may be called again."""
    library.gptlite_emu_reset()
    _ctypes.dlclose(library._handle)
