"""The C functions of a kernel library by ctypes: argument types read from the header, and its structs."""

import ctypes
import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from gptlite.kernels.library import prepare

HEADER = Path(__file__).parents[2] / "kernels" / "include" / "gptlite_kernels.h"
CODES = {None: -1, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_PARALLEL_FOR = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _BODY, ctypes.c_void_p)
_SCALARS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
_SCALARS["uint32_t"] = ctypes.c_uint32


class GptliteThreads(ctypes.Structure):
    _fields_ = (("parallel_for", _PARALLEL_FOR),)


@functools.cache
def header() -> str:
    """Without comments and macros."""
    return re.sub(r"//[^\n]*|^#define(?:.*\\\n)*.*\n", "", HEADER.read_text(), flags=re.MULTILINE)


def _type(declaration: str) -> type:
    return ctypes.c_void_p if "*" in declaration else _SCALARS[declaration.split()[0]]


def struct(name: str) -> type[ctypes.Structure]:
    """A struct of the header, of scalars and pointers."""
    (body,) = re.findall(rf"struct {name} {{(.*?)}}", header(), re.DOTALL)
    fields = [(line.split()[-1], _type(line)) for line in body.split(";") if line.strip()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


GptliteDropout, GptliteLoss, GptliteHeads, GptliteAdam = (
    struct(f"Gptlite{name}") for name in ("Dropout", "Loss", "Heads", "Adam")
)


@functools.cache
def signatures() -> dict[str, list[type]]:
    """The argument types of each kernel, without the context: `softmax`, or a whole name where it has one form."""
    kernels = dict(re.findall(r"GPTLITE_KERNEL\((\w+),([^)]*)\)", header()))
    alone = {
        name: text.rpartition(",")[0]
        for name, text in re.findall(r"int (gptlite_cpu_(?:attention|weight)\w+)\(([^)]*)\)", header())
    }
    return {name: [_type(each) for each in text.split(",")] for name, text in (kernels | alone).items()}


def compiled() -> Path:
    """The library that users get on a machine without a GPU, from their cache where it is."""
    return prepare(cuda=False, log=print).path


def load(path: Path) -> ctypes.CDLL:
    """The library, with the types of the functions that are not kernels."""
    library = ctypes.CDLL(str(path))
    for name in ("gptlite_rows_workspace", "gptlite_norm_workspace"):
        getattr(library, name).argtypes = [ctypes.c_int64, ctypes.c_int64]
        getattr(library, name).restype = ctypes.c_int64
    if hasattr(library, "gptlite_cpu_isa"):
        library.gptlite_cpu_isa.restype = ctypes.c_char_p
        library.gptlite_cpu_limit_isa.argtypes = [ctypes.c_char_p]
    return library


Ranges = Callable[[int, int, int], list[tuple[int, int]]]


class Threads:
    """A GptliteThreads that runs the ranges of a split, in its order or at once. `most` is the largest split seen."""

    def __init__(self, ranges: Ranges, at_once: bool = False) -> None:
        self._ranges, self._at_once = ranges, at_once
        self.most = 0
        self.struct = GptliteThreads(_PARALLEL_FOR(self._run))

    def _run(self, begin: int, end: int, grain: int, body: Callable, state: int) -> None:
        ranges = self._ranges(begin, end, max(grain, 1)) if end > begin else []
        self.most = max(self.most, len(ranges))
        if not self._at_once:
            for first, last in ranges:
                body(state, first, last)
            return
        threads = [threading.Thread(target=body, args=(state, *each)) for each in ranges]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def halves(begin: int, end: int, grain: int) -> list[tuple[int, int]]:
    """Two ranges, or one where they would be under the grain."""
    middle = begin + (end - begin + 1) // 2
    return [(begin, middle), (middle, end)] if end - begin >= 2 * grain else [(begin, end)]


def reversed_grains(begin: int, end: int, grain: int) -> list[tuple[int, int]]:
    """As many ranges as there may be, the last one first, of uneven sizes."""
    starts = list(range(begin, end, grain))
    if len(starts) > 1 and end - starts[-1] < grain:
        starts.pop()
    return list(zip(starts, [*starts[1:], end], strict=True))[::-1]


def uneven(begin: int, end: int, grain: int) -> list[tuple[int, int]]:
    """A short range, then the rest."""
    return [(begin, begin + grain), (begin + grain, end)] if end - begin >= 2 * grain else [(begin, end)]
