"""Memory that an op allocates and frees besides its results.

Our kernels' workspaces follow from shapes. On a CPU, oneDNN copies the operands and results of convolutions and of some
products in 16 bits or fewer into blocked layouts, and converts or sums in buffers. These depend on the CPU's
instruction set, the number of threads and the version, so they are measured: the op runs once on tensors of the same
shapes and strides, and its allocations are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from gptlite.satellites.plan.cache import cached
from gptlite.torch_private.allocations import recorded_allocations
from gptlite.torch_private.dispatch import profiler_runs
from gptlite.torch_private.ops import tree_leaves
from gptlite.torch_private.recording import SCALED_MM, op_name, real_tensors

FILTERS = {"convolution": 1, "convolution_backward": 2}  # convolutions: index of the weight
# Products, which are measured in 16 bits or fewer; in fp32 they allocate only results. As in ALONG: indices of the
# arguments whose first dim counts samples or rows, that of the left factor last.
GEMMS = {"mm": (0,), "addmm": (1,), "bmm": (1, 0), "baddbmm": (0, 2, 1), SCALED_MM: (0,)}
ALONG = {"convolution": (0,), "convolution_backward": (0, 1), **GEMMS}
ROWS = 256  # maximum number of parts of the rows that our kernels sum separately, see kernels/cpu/workspace.cpp
# Our ops that sum over rows: index of the argument with the rows.
ROWS_OF = {"layer_norm_backward": 1, "residual_norm_backward": 2, "bias_activation_backward": 1, "rope_backward": 0}
# An op above these bytes of arguments and results, or FLOPs, is measured twice with fewer samples or rows.
MOST_BYTES, MOST_FLOPS = 2**28, 2e9


def workspace_bytes(func: Any, args: Any) -> int:
    """Return the bytes that one of our kernels allocates and frees besides its results."""
    name = op_name(func).replace("_amax", "")  # an op that also returns an amax needs the same
    if func.namespace != "gptlite" or name not in (*ROWS_OF, "join_heads"):
        return 0
    if name == "join_heads":  # a row has the heads of q, k and v of a token
        dq, dk, *_ = args
        leading, width = dq.shape[:2], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    else:
        *leading, width = args[ROWS_OF[name]].shape
    return 4 * 3 * min(prod(leading), ROWS) * width  # up to three fp32 sums of each column in each part


def is_measured(func: Any, args: Any) -> bool:
    """Return True if the memory of an op on a CPU depends on the instruction set."""
    if func.namespace != "aten":
        return False
    return op_name(func) in FILTERS or (op_name(func) in GEMMS and args[0].itemsize <= 2)


@cached(lambda func, args, out, threads: (func, _signature(args), threads))
def tape_of(func: Any, args: Any, out: Any, threads: int) -> list[tuple[int, int]]:
    """Return what an op allocates and frees on this CPU with that many threads, in order, as pairs of bytes and place.

    A result has its place among the results, from 0, and only its allocation is listed. Memory that the op also frees
    has a negative place, and negative bytes where it is freed.

    What a convolution takes grows linearly with its samples, at least from the second on, so the memory of a large one
    follows from two smaller ones. The buffers of products do not grow beyond some size.
    """
    if profiler_runs():  # the recorder of allocations serves one at a time
        return []
    along = ALONG[op_name(func)]
    count = args[along[-1]].shape[0]
    size = sum(each.nbytes for each in tensors_of((args, out)))
    share = max(size / MOST_BYTES, _flops(func, args, out) / MOST_FLOPS)
    with real_tensors(), torch.no_grad(), _threads(threads):
        if share <= 1 or (few := max(2, int(count / share / 2))) * 2 >= count:
            return _run(func, args, along, count)
        one, two = (_run(func, args, along, rows) for rows in (few, 2 * few))
    if op_name(func) in GEMMS:
        return two
    if [place for _, place in one] != [place for _, place in two]:
        one = [(size // 2, place) for size, place in two]
    return [(a + (b - a) * (count - few) // few, place) for (a, place), (b, _) in zip(one, two, strict=True)]


def _flops(func: Any, args: Any, out: Any) -> float:
    """Return about how many FLOPs an op takes."""
    if op_name(func) in FILTERS:
        result = args[0] if "backward" in op_name(func) else out
        return 2.0 * len(tensors_of(out)) * result.numel() * prod(args[FILTERS[op_name(func)]].shape[1:])
    return 2.0 * out.numel() * args[ALONG[op_name(func)][-1]].shape[-1]


def _run(func: Any, args: Any, along: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """Run an op on `rows` samples or rows, and return its tape, see `tape_of`."""
    real = [
        _tensor(value, rows if place in along else None) if isinstance(value, Tensor) else value
        for place, value in enumerate(args)
    ]
    with recorded_allocations() as allocations:
        out = func(*real)
    results = {each.data_ptr(): place for place, each in enumerate(tensors_of(out)) if each.nbytes}
    last = {address: index for index, (_, address, size) in enumerate(allocations) if size > 0}
    tape, temporary = list[tuple[int, int]](), dict[int, int]()
    for index, (_, address, size) in enumerate(allocations):
        if size > 0 and address in results and last[address] == index:  # a result may reuse freed memory
            tape.append((size, results[address]))
        else:
            place = -1 - len(tape) if size > 0 else temporary.pop(address)
            temporary |= {address: place} if size > 0 else {}
            tape.append((size, place))
    return [(size, place) for size, place in tape if place not in temporary.values()]  # without what the op keeps


def _tensor(like: Tensor, rows: int | None) -> Tensor:
    """Return zeros in memory with the shape, strides and dtype of `like`, or with at most `rows` of its first dim."""
    shape = [*like.shape]
    if rows is not None:
        shape[0] = min(shape[0], rows)
    return torch.empty_strided(shape, like.stride(), dtype=like.dtype, device="cpu").zero_()


def _signature(args: Any) -> tuple[object, ...]:
    """Return what an op's memory depends on: shapes, strides and dtypes of tensors, and other arguments."""
    leaves = tree_leaves(args)
    return tuple((each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each for each in leaves)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors among nested values."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
