"""CUDA's stream capture, which records the kernels that a function enqueues, and launches all of them again at once.

See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """Records functions. Everything recorded reads and writes the memory that it had when it was recorded."""

    def warm(self, function: Callable[[], T]) -> T:
        """Call a function as often as needed before it is recorded, and return its result."""
        ...

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], Any]]:
        """Record what a function enqueues, without executing it. Return its result, whose tensors have no values yet,
        and a function that executes the record."""
        ...


class CudaRecorder:
    """Recorder of CUDA graphs. All of them share one pool of memory, so at most one of them has valid intermediate
    results, which is why a step's results are copied before another step begins."""

    def __init__(self) -> None:
        # Steps before the first record run on its stream too: autograd remembers the streams of parameters.
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def warm(self, function: Callable[[], T]) -> T:
        """Call a function on the stream of the records, after what is enqueued and before what will be."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], Any]]:
        """Capture a function. Raises RuntimeError for what cannot be captured, such as a read by the host."""
        graph = torch.cuda.CUDAGraph()
        # The loader's thread may allocate page-locked memory meanwhile, which other modes forbid to all threads.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay
