"""Loads the kernels into torch, compiling them first where no process of this machine has: `load`."""

import ctypes
import hashlib
import platform
import tempfile
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from gptlite.kernels import fakes
from gptlite.kernels.build import build
from gptlite.kernels.cache import UNFINISHED, Record, forget, keep, known_folders, locked, lookup, writable_folder
from gptlite.kernels.toolchain import BuildError, Compiler, find_cxx, find_nvcc
from gptlite.kernels.units import ROOT, sources
from gptlite.progress import Log


@dataclass(frozen=True)
class Loaded:
    """The library that `torch.ops.gptlite` is from."""

    path: Path
    cuda: bool  # it has the CUDA kernels too
    isa: str  # instruction sets its CPU kernels use here: "avx512 avx512_bf16 amx_bf16"
    seconds: float  # that its compilation took
    cached: bool  # before this process came
    why_no_cuda: str  # where there is a GPU and it has none


@dataclass(frozen=True)
class Unavailable:
    """No kernels, and why, in one line."""

    reason: str


@dataclass(frozen=True)
class Library:
    """A compiled library, not loaded."""

    path: Path
    record: Record
    cached: bool
    why_no_cuda: str


@dataclass(frozen=True)
class _Log:
    """All are equal: `cache` tells calls apart by their other arguments."""

    write: Log = field(compare=False)


def load(device_type: str, log: Log = print) -> Loaded | Unavailable:
    """Makes `torch.ops.gptlite` work on the device's tensors; the second call of a process returns what the first did.

    Where there is a GPU both CPU and CUDA kernels are compiled, else the CPU's alone. `log` gets a line on what takes
    long or went wrong.
    """
    if device_type not in ("cpu", "cuda"):
        return Unavailable(f"there are kernels for cpu and cuda, not for {device_type}")
    if device_type == "cuda" and not torch.cuda.is_available():
        return Unavailable("torch finds no CUDA device")
    loaded = _load_once(_Log(log))
    if device_type == "cuda" and isinstance(loaded, Loaded) and not loaded.cuda:
        return Unavailable(loaded.why_no_cuda)
    return loaded


@cache
def _load_once(log: _Log) -> Loaded | Unavailable:
    try:
        library = prepare(torch.cuda.is_available(), log.write)
        try:
            torch.ops.load_library(library.path)
        except OSError as error:
            log.write(f"kernels: {library.path} does not load ({error}): compiling it again")
            forget(library.path)
            library = prepare(torch.cuda.is_available(), log.write)
            torch.ops.load_library(library.path)
        fakes.register()
        isa = ctypes.CDLL(str(library.path)).gptlite_cpu_isa
        isa.restype = ctypes.c_char_p
    except (BuildError, OSError) as error:
        return Unavailable(str(error))
    record = library.record
    return Loaded(library.path, record.cuda, isa().decode(), record.seconds, library.cached, library.why_no_cuda)


def prepare(cuda: bool, log: Log) -> Library:
    """The compiled library, from the cache if it is there. Raises BuildError, OSError.

    `cuda`: with the CUDA kernels, if they compile. Where a compiler is missing that another machine had which shares
    the cache, what that one compiled of the same sources will do.
    """
    if platform.system() != "Linux":
        raise BuildError(f"the kernels are for Linux, this is {platform.system()}")
    tools = _tools(cuda)
    if isinstance(tools, Library):
        return tools
    cxx, nvcc, why_no_cuda = tools
    path, record, cached = _cached_or_compiled(_name(cxx, nvcc), cxx, nvcc, log)
    return Library(path, record, cached, why_no_cuda or record.why_no_cuda)


def compiled() -> Library | None:
    """What `prepare` would return without compiling."""
    try:
        tools = _tools(torch.cuda.is_available())
        if isinstance(tools, Library):
            return tools
        if found := _cached(_name(tools[0], tools[1])):
            return Library(*found, True, tools[2] or found[1].why_no_cuda)
    except (BuildError, OSError):  # what `prepare` would raise: there is none either way
        pass
    return None


def _tools(cuda: bool) -> tuple[Compiler, Compiler | None, str] | Library:
    """The compilers, nvcc with the reason if there is none; or a library, where one lacks that another machine had."""
    nvcc, why_no_cuda = None, ""
    if cuda:
        try:
            nvcc = find_nvcc()
        except BuildError as error:
            why_no_cuda = str(error)
            if other := _from_elsewhere(cuda=True):
                return other
    try:
        return find_cxx(), nvcc, why_no_cuda
    except BuildError:
        if other := _from_elsewhere(cuda=False):
            return other
        raise


def _cached_or_compiled(name: str, cxx: Compiler, nvcc: Compiler | None, log: Log) -> tuple[Path, Record, bool]:
    if found := _cached(name):
        return *found, True
    folder = writable_folder(log)
    library = folder / name
    with locked(folder, log):
        if record := lookup(library):
            return library, record, True
        if library.exists():
            log(f"kernels: {library} is damaged: compiling it again")
        return library, _compile(library, cxx, nvcc, log), False


def _cached(name: str) -> tuple[Path, Record] | None:
    for folder in known_folders():  # one that is read-only now may have it all the same
        if record := lookup(folder / name):
            return folder / name, record
    return None


def _compile(library: Path, cxx: Compiler, nvcc: Compiler | None, log: Log) -> Record:
    what = "CPU and CUDA kernels" if nvcc else "CPU kernels"
    log(f"kernels: compiling the {what}, once for this machine, into {library.parent}; this can take a minute")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=UNFINISHED) as folder:
        compiled = Path(folder, library.name)
        parts = build(compiled, cxx, nvcc, log)
        seconds = round(time.monotonic() - start, 1)
        said = Record("", parts.cuda, parts.why_no_cuda, str(cxx), str(nvcc or ""), seconds)
        record = keep(library, said, compiled)
    log(f"kernels: compiled in {seconds:.0f} s")
    return record


def _from_elsewhere(cuda: bool) -> Library | None:
    for path in (path for folder in known_folders() for path in sorted(folder.glob(f"{_prefix(cuda)}-*.so"))):
        record = lookup(path)
        if record and record.cuda >= cuda:
            return Library(path, record, True, record.why_no_cuda)
    return None


def _name(cxx: Compiler, nvcc: Compiler | None) -> str:
    tools = repr((cxx.command, cxx.version, nvcc and nvcc.version))
    return f"{_prefix(nvcc is not None)}-{hashlib.sha256(tools.encode()).hexdigest()[:16]}.so"


def _prefix(cuda: bool) -> str:
    """What must be the same wherever a library is to run: sources, flags (in a source), processor, C library."""
    digest = hashlib.sha256(repr(platform.libc_ver()).encode())
    for path in sources(cuda):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return f"gptlite-{platform.machine()}-{'cuda' if cuda else 'cpu'}-{digest.hexdigest()[:16]}"
