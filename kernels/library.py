"""Loads the kernels into torch, compiling them first where no process of this machine has: `load`."""

import ctypes
import hashlib
import platform
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from gptlite.kernels import fakes
from gptlite.kernels.build import build
from gptlite.kernels.cache import UNFINISHED, Record, forget, keep, known_folders, locked, lookup, writable_folder
from gptlite.kernels.toolchain import BuildError, Compiler, find_cxx, find_nvcc
from gptlite.kernels.units import OLDEST_PORTABLE, ROOT, sources
from gptlite.progress import Log

STREAM = "aoti_torch_get_current_cuda_stream"


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


_LOADED: list[Loaded | Unavailable] = []  # what the first call of `load` found


def load(device_type: str, log: Log = print) -> Loaded | Unavailable:
    """Makes `torch.ops.gptlite` work on the device's tensors; the second call of a process returns what the first did.

    Where there is a GPU both CPU and CUDA kernels are compiled, else the CPU's alone. `log` gets a line on what takes
    long or went wrong.
    """
    if device_type not in ("cpu", "cuda"):
        return Unavailable(f"there are kernels for cpu and cuda, not for {device_type}")
    if device_type == "cuda" and not torch.cuda.is_available():
        return Unavailable("torch finds no CUDA device")
    if not _LOADED:
        _LOADED.append(_load(log))
    (loaded,) = _LOADED
    if device_type == "cuda" and isinstance(loaded, Loaded):
        if not loaded.cuda:
            return Unavailable(loaded.why_no_cuda)
        if not knows_stream(loaded.path):
            return Unavailable(f"torch {torch.__version__} does not tell its stream: it lacks {STREAM}")
    return loaded


def knows_stream(path: Path) -> bool:
    """Whether this torch has what the CUDA kernels of a library ask for their stream."""
    return bool(ctypes.CDLL(str(path)).gptlite_cuda_knows_stream())


def _load(log: Log) -> Loaded | Unavailable:
    try:
        library = prepare(torch.cuda.is_available(), log)
        try:
            torch.ops.load_library(library.path)
        except OSError as error:
            log(f"kernels: {library.path} does not load ({error}): compiling it again")
            forget(library.path)
            library = prepare(torch.cuda.is_available(), log)
            torch.ops.load_library(library.path)
        fakes.register()
        isa = ctypes.CDLL(str(library.path)).gptlite_cpu_isa
        isa.restype = ctypes.c_char_p
    except (BuildError, OSError) as error:
        return Unavailable(str(error))
    record = library.record
    return Loaded(library.path, record.cuda, isa().decode(), record.seconds, library.cached, library.why_no_cuda)


def prepare(cuda: bool, log: Log, arch: str | None = None) -> Library:
    """The compiled library, from the cache if it is there. Raises BuildError, OSError.

    `cuda`: with the CUDA kernels, if they compile, for the architecture `arch` ("90"; "": any from sm_80 on; None: that
    of the GPU that is here). Where a compiler is missing that another machine had which shares the cache, what that one
    compiled of the same sources will do.
    """
    if platform.system() != "Linux":
        raise BuildError(f"the kernels are for Linux, this is {platform.system()}")
    tools = _tools(cuda, arch)
    if isinstance(tools, Library):
        return tools
    if found := _find(tools.names, why_no_cuda=tools.why_no_cuda):
        return found
    folder = writable_folder(log)
    path = folder / tools.names[0]
    with locked(folder, log):
        cached = record = lookup(path)  # another process may have been there first
        if record is None:
            if path.exists():
                log(f"kernels: {path} is damaged: compiling it again")
            record = _compile(path, tools, log)
    return Library(path, record, cached is not None, tools.why_no_cuda or record.why_no_cuda)


def compiled() -> Library | None:
    """What `prepare` would return without compiling."""
    try:
        tools = _tools(torch.cuda.is_available(), None)
        return tools if isinstance(tools, Library) else _find(tools.names, why_no_cuda=tools.why_no_cuda)
    except (BuildError, OSError):  # what `prepare` would raise: there is none either way
        return None


def gpu_arch() -> str:
    """The architecture of the GPUs here, "90"; nothing where there is none, or where they differ."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {"".join(map(str, torch.cuda.get_device_capability(index))) for index in range(count)}
    return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class _Tools:
    """The compilers, nvcc with the reason if there is none. `archs`: those of which a library will do, the one to
    compile for first."""

    cxx: Compiler
    nvcc: Compiler | None
    why_no_cuda: str
    archs: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """What the library may be called."""
        tools = repr((self.cxx.command, self.cxx.version, self.nvcc and self.nvcc.version))
        digest = hashlib.sha256(tools.encode()).hexdigest()[:16]
        return [f"{prefix}-{digest}.so" for prefix in _prefixes(self.nvcc is not None, self.archs)]


def _tools(cuda: bool, arch: str | None) -> _Tools | Library:
    """The compilers; or a library, where one lacks that another machine had."""
    nvcc, why_no_cuda, archs = None, "", ("",)
    if cuda:
        archs = _serving(gpu_arch()) if arch is None else (arch,)
        try:
            nvcc = find_nvcc()
        except BuildError as error:
            why_no_cuda = str(error)
            if other := _from_elsewhere(True, archs):
                return other
    if nvcc and archs[0] and not nvcc.compiles_for(archs[0]):
        if "" not in archs:
            raise BuildError(f"{nvcc} does not compile for sm_{archs[0]}")
        archs = ("",)
    try:
        return _Tools(find_cxx(), nvcc, why_no_cuda, archs)
    except BuildError:
        if other := _from_elsewhere(False, archs):
            return other
        raise


def _serving(arch: str) -> tuple[str, ...]:
    """The architectures whose library serves a GPU: its own, or the one for any, if the GPU is not too old."""
    return (arch, "") if arch and int(arch) >= OLDEST_PORTABLE else (arch,)


def _find(patterns: Iterable[str], cuda: bool = False, why_no_cuda: str = "") -> Library | None:
    """A compiled library of such a name. One that is read-only now will do."""
    for pattern in patterns:
        for path in (path for folder in known_folders() for path in sorted(folder.glob(pattern))):
            record = lookup(path)
            if record and record.cuda >= cuda:
                return Library(path, record, True, why_no_cuda or record.why_no_cuda)
    return None


def _compile(library: Path, tools: _Tools, log: Log) -> Record:
    cxx, nvcc, arch = tools.cxx, tools.nvcc, tools.archs[0]
    what = f"CPU and CUDA kernels{f' for sm_{arch}' if arch else ''}" if nvcc else "CPU kernels"
    log(f"kernels: compiling the {what}, once for this machine, into {library.parent}; this can take a minute")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=UNFINISHED) as folder:
        compiled = Path(folder, library.name)
        why_no_cuda = build(compiled, cxx, nvcc, log, arch)
        seconds = round(time.monotonic() - start, 1)
        cuda = nvcc is not None and not why_no_cuda
        record = keep(library, Record("", cuda, why_no_cuda, str(cxx), str(nvcc or ""), seconds), compiled)
    log(f"kernels: compiled in {seconds:.0f} s")
    return record


def _from_elsewhere(cuda: bool, archs: tuple[str, ...]) -> Library | None:
    return _find((f"{prefix}-*.so" for prefix in _prefixes(cuda, archs)), cuda)


def _prefixes(cuda: bool, archs: tuple[str, ...]) -> list[str]:
    """What must be the same wherever a library is to run: sources, flags (in a source), processor, C library, and the
    GPU's architecture."""
    digest = hashlib.sha256(repr(platform.libc_ver()).encode())
    for path in sources(cuda):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    kinds = [f"cuda-sm_{arch}" if arch else "cuda" for arch in archs] if cuda else ["cpu"]
    return [f"gptlite-{platform.machine()}-{kind}-{digest.hexdigest()[:16]}" for kind in kinds]
