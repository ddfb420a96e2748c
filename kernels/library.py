"""Loading of the kernels into torch with `load`. They are compiled first if this machine's cache lacks them."""

import ctypes
import hashlib
import platform
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from gptlite.cpu import level_limit
from gptlite.kernels import fakes
from gptlite.kernels.build import build
from gptlite.kernels.cache import (
    UNFINISHED,
    LibraryRecord,
    forget,
    keep,
    known_folders,
    locked,
    lookup,
    writable_folder,
)
from gptlite.kernels.toolchain import BuildError, Compiler, find_cxx, find_nvcc
from gptlite.kernels.units import OLDEST_PORTABLE, ROOT, sources
from gptlite.progress import Log

STREAM = "aoti_torch_get_current_cuda_stream"


@dataclass(frozen=True)
class LoadedLibrary:
    """Loaded library, which implements `torch.ops.gptlite`."""

    path: Path
    cuda: bool  # it includes the CUDA kernels
    isa: str  # instruction sets used by its CPU kernels here: "avx512 avx512_bf16 amx_bf16"
    seconds: float  # compilation time
    cached: bool  # it was found in the cache, not compiled by this process
    why_no_cuda: str  # reason for missing CUDA kernels on a machine with a GPU


@dataclass(frozen=True)
class Unavailable:
    """Result of `load` without kernels: the reason, in one line."""

    reason: str


@dataclass(frozen=True)
class Library:
    """Compiled library that is not loaded yet."""

    path: Path
    record: LibraryRecord
    cached: bool
    why_no_cuda: str


_LOADED: list[LoadedLibrary | Unavailable] = []  # result of the first call of `load`


def load(device_type: str, log: Log = print) -> LoadedLibrary | Unavailable:
    """Load `torch.ops.gptlite` for the tensors of a device. Later calls in a process return the first result.

    On a machine with a GPU both CPU and CUDA kernels are compiled, otherwise only the CPU kernels. `log` is called
    with a line for slow steps and failures.
    """
    if device_type not in ("cpu", "cuda"):
        return Unavailable(f"kernels exist for cpu and cuda, not for {device_type}")
    if device_type == "cuda" and not torch.cuda.is_available():
        return Unavailable("torch finds no CUDA device")
    if not _LOADED:
        _LOADED.append(_load(log))
    (loaded,) = _LOADED
    if device_type == "cuda" and isinstance(loaded, LoadedLibrary):
        if not loaded.cuda:
            return Unavailable(loaded.why_no_cuda)
        if not knows_stream(loaded.path):
            return Unavailable(f"torch {torch.__version__} lacks {STREAM}, which returns the current CUDA stream")
    return loaded


def is_loaded(device_type: str) -> bool:
    """Return True if this process has loaded the kernels for tensors of a device. Loads nothing."""
    return bool(_LOADED) and isinstance(load(device_type), LoadedLibrary)


def knows_stream(path: Path) -> bool:
    """Return True if this torch has the function from which the CUDA kernels get their stream."""
    return bool(ctypes.CDLL(str(path)).gptlite_cuda_knows_stream())


def _load(log: Log) -> LoadedLibrary | Unavailable:
    try:
        library = prepare(torch.cuda.is_available(), log)
        try:
            torch.ops.load_library(library.path)
        except OSError as error:
            log(f"kernels: {library.path} does not load ({error}); compiling it again")
            forget(library.path)
            library = prepare(torch.cuda.is_available(), log)
            torch.ops.load_library(library.path)
        fakes.register()
        isa = _limited(ctypes.CDLL(str(library.path)))
    except (BuildError, OSError) as error:
        return Unavailable(str(error))
    record = library.record
    return LoadedLibrary(library.path, record.cuda, isa, record.seconds, library.cached, library.why_no_cuda)


def _limited(library: ctypes.CDLL) -> str:
    """Limit the CPU kernels to the instruction sets that torch and oneDNN may use, and return those that they use."""
    library.gptlite_cpu_limit_isa(level_limit().encode())  # without effect if the CPU lacks that level
    library.gptlite_cpu_isa.restype = ctypes.c_char_p
    return library.gptlite_cpu_isa().decode()


def prepare(cuda: bool, log: Log, arch: str | None = None) -> Library:
    """Return the compiled library, from the cache if it is there. Raises BuildError, OSError.

    With `cuda` it includes the CUDA kernels, if they compile, for the architecture `arch` ("90"; "" for any from sm_80
    on; None for the local GPU). If a compiler is missing, a library that another machine compiled from the same sources
    into a shared cache is accepted.
    """
    if platform.system() != "Linux":
        raise BuildError(f"the kernels run only on Linux, not on {platform.system()}")
    tools = _tools(cuda, arch)
    if isinstance(tools, Library):
        return tools
    if found := _find(tools.names, why_no_cuda=tools.why_no_cuda):
        return found
    folder = writable_folder(log)
    path = folder / tools.names[0]
    with locked(folder, log):
        cached = record = _usable(path)  # another process may have compiled it meanwhile
        if record is None:
            if path.exists():
                log(f"kernels: {path} is damaged; compiling it again")
            record = _compile(path, tools, log)
    return Library(path, record, cached is not None, tools.why_no_cuda or record.why_no_cuda)


def compiled() -> Library | None:
    """Return the library that `prepare` would return without compiling, or None."""
    try:
        tools = _tools(torch.cuda.is_available(), None)
        return tools if isinstance(tools, Library) else _find(tools.names, why_no_cuda=tools.why_no_cuda)
    except (BuildError, OSError):  # `prepare` would raise these: there is no library either way
        return None


def gpu_arch() -> str:
    """Return the architecture of the local GPUs, such as "90"; "" if there are none, or if they differ."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {"".join(map(str, torch.cuda.get_device_capability(index))) for index in range(count)}
    return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class _Tools:
    """Compilers, with the reason if nvcc is missing. The library is compiled for the first of `archs`.

    Cached libraries for the other architectures in `archs` are accepted too. "" stands for any from sm_80 on.
    """

    cxx: Compiler
    nvcc: Compiler | None
    why_no_cuda: str
    archs: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Acceptable file names of the library. A newly compiled library gets the first name."""
        tools = repr((self.cxx.command, self.cxx.version, self.nvcc and self.nvcc.version))
        digest = hashlib.sha256(tools.encode()).hexdigest()[:16]
        return [f"{prefix}-{digest}.so" for prefix in _prefixes(self.nvcc is not None, self.archs)]


def _tools(cuda: bool, arch: str | None) -> _Tools | Library:
    """Return the compilers, or a library from another machine if a compiler is missing here."""
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
    """Return the architectures of libraries that run on a GPU: `arch`, and the portable "" from sm_80 on."""
    return (arch, "") if arch and int(arch) >= OLDEST_PORTABLE else (arch,)


def _find(patterns: Iterable[str], cuda: bool = False, why_no_cuda: str = "") -> Library | None:
    """Return the first compiled library that matches a name pattern, or None. Its folder may be read-only."""
    for pattern in patterns:
        for path in (path for folder in known_folders() for path in sorted(folder.glob(pattern))):
            record = _usable(path)
            if record and record.cuda >= cuda:
                return Library(path, record, True, why_no_cuda or record.why_no_cuda)
    return None


def _usable(library: Path) -> LibraryRecord | None:
    """Return the record of a library that matches its hash and declares all ops, else None.

    A library is not loaded for this: torch cannot unload it, and then refuses another one with the same ops.
    """
    if record := lookup(library):
        content = library.read_bytes()
        return record if all(f"{name}(".encode() in content for name in fakes.FAKES) else None
    return None


def _compile(library: Path, tools: _Tools, log: Log) -> LibraryRecord:
    cxx, nvcc, arch = tools.cxx, tools.nvcc, tools.archs[0]
    what = f"CPU and CUDA kernels{f' for sm_{arch}' if arch else ''}" if nvcc else "CPU kernels"
    log(f"kernels: compiling the {what}, once for this machine, into {library.parent}; this can take a minute")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=UNFINISHED) as folder:
        compiled = Path(folder, library.name)
        why_no_cuda = build(compiled, cxx, nvcc, log, arch)
        seconds = round(time.monotonic() - start, 1)
        cuda = nvcc is not None and not why_no_cuda
        record = keep(library, LibraryRecord("", cuda, why_no_cuda, str(cxx), str(nvcc or ""), seconds), compiled)
    log(f"kernels: compiled in {seconds:.0f} s")
    return record


def _from_elsewhere(cuda: bool, archs: tuple[str, ...]) -> Library | None:
    return _find((f"{prefix}-*.so" for prefix in _prefixes(cuda, archs)), cuda)


def _prefixes(cuda: bool, archs: tuple[str, ...]) -> list[str]:
    """Return acceptable name prefixes of the library, without the part that depends on the compilers.

    Prefixes depend on the processor, the GPU's architecture, the C library, and the sources, which contain the flags.
    """
    digest = hashlib.sha256(repr(platform.libc_ver()).encode())
    for path in sources(cuda):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    kinds = [f"cuda-sm_{arch}" if arch else "cuda" for arch in archs] if cuda else ["cpu"]
    return [f"gptlite-{platform.machine()}-{kind}-{digest.hexdigest()[:16]}" for kind in kinds]
