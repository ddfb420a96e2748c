"""Host memory limit per rank, and detection of out-of-memory failures. Does not import torch."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gptlite.errors import text_of

GIB = 2**30
# Texts of errors that have no exception type. Errors of gloo and NCCL for a lost connection must not match.
HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc|Cannot allocate memory"
)
# Errors with several possible causes, attributed to memory only if a limit is near.
UNCLEAR = re.compile(r"can't start new thread|Resource temporarily unavailable|inline_container|could not create a")
# torch's stable ABI, which gptlite's kernels use, drops the reason. Only lack of memory makes this call fail.
KERNEL = re.compile(r"aoti_torch_empty_strided\(.*API call failed")
NEAR = 64 * 2**20  # bytes below the limit at which an unclear error is attributed to memory
NOTE_SECONDS = 0.02
DEVICE = re.compile(r"CUDA out of memory|CUDA error: out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED")
ASKED = re.compile(r"[Tt]ried to allocate ([\d.,]+) (bytes|[KMGT]iB)")
FREE = re.compile(r"of which ([\d.]+ [KMGT]iB) is free")


def limit(gib: float | None) -> None:
    """Make allocations of this process beyond `gib` GiB of private memory raise an error; None sets no limit.

    Linux counts the heap and private writable mappings (RLIMIT_DATA), but not files or shared memory.
    """
    if gib is not None:
        _set_limit(int(gib * GIB))


def limit_words(gib: float | None) -> str:
    """Return the suffix of an out-of-memory message that names the limit; empty without a limit."""
    return f" (trainer.host_memory_limit={gib:g} GiB)" if gib else ""


def lift() -> None:
    """Remove the limit, so that error handling can allocate memory."""
    _set_limit(None)


def _set_limit(most: int | None) -> None:
    if sys.platform == "linux":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = hard if most is None or 0 <= hard < most else most  # an unlimited hard limit is -1
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def out_of_memory(error: BaseException) -> str:
    """Return a one-line reason if an exception, or one in its chain of causes, is an out-of-memory failure; else ""."""
    for cause in _chain(error):
        text = text_of(cause)
        if type(cause).__name__ == "OutOfMemoryError" or DEVICE.search(text):  # by name, as torch is not imported here
            free = FREE.search(text)
            return f"CUDA memory ran out{_asked(text)}{f', {free[1]} free' if free else ''}"
        if isinstance(cause, MemoryError) or HOST.search(text):
            return f"host memory ran out{_asked(text)}"
        if KERNEL.search(text):
            return "memory ran out while allocating a kernel's result"
        if UNCLEAR.search(text) and _limit_is_near():
            return f"host memory ran out: {text.strip().splitlines()[0]}"
    return ""


def note_use(file: Path) -> None:
    """Record this process's peak memory in a file for `was_near`, from a thread. It is counted as for the limit."""

    def watch() -> None:
        page, most = os.sysconf("SC_PAGE_SIZE"), 0
        with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as statm, file.open("wb", 0) as out:
            while True:
                # data and stack, about what RLIMIT_DATA counts
                used = int(os.pread(statm.fileno(), 200, 0).split()[5]) * page
                if used > most:
                    most = used
                    os.pwrite(out.fileno(), b"%020d" % used, 0)  # fixed width, to overwrite the previous value
                time.sleep(NOTE_SECONDS)  # short, as an abort leaves no time for a last update

    threading.Thread(target=watch, daemon=True, name="memory in use").start()


def was_near(file: Path, gib: float | None) -> bool:
    """Return True if the peak recorded by `note_use` is within NEAR bytes of a limit or above it."""
    with suppress(OSError, ValueError):
        return gib is not None and int(file.read_bytes()) > gib * GIB - NEAR
    return False


def kernel_kills() -> int:
    """Return the number of processes that the kernel's OOM killer has ended so far, on this machine and in this control
    group."""
    count = 0
    for path in (Path("/proc/vmstat"), *_memory_events()):
        with suppress(OSError, ValueError):
            lines = (line.split() for line in path.read_text().splitlines())
            count += sum(int(fields[1]) for fields in lines if len(fields) == 2 and fields[0] == "oom_kill")
    return count


def prefer_oom_kill() -> None:
    """Make the OOM killer prefer this process to its launcher, which reports the failure."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _memory_events() -> Iterator[Path]:
    """Yield the memory.events file of this process's control group (version 2)."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                yield Path("/sys/fs/cgroup", line[3:].lstrip("/"), "memory.events")


def _limit_is_near() -> bool:
    """Return True if NEAR more bytes cannot be allocated. A step's memory is still held while its error is handled."""
    try:
        bytearray(NEAR)
    except MemoryError:
        return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, since a pipeline's schedule wraps what its stages raise."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # chains may be cyclic
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _asked(text: str) -> str:
    """Return the suffix of a message with the size of the failed allocation; empty if the text has none."""
    if not (match := ASKED.search(text)):
        return ""
    size = match[1].rstrip(".,").replace(",", "")
    words = f"{float(size) / 2**20:.1f} MiB" if match[2] == "bytes" else f"{size} {match[2]}"
    return f": tried to allocate {words}"
