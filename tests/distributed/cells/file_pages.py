"""What ranks do in test_infinite_pages.py: steps, a save and a load, while cached pages are counted."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from threading import Event, Thread
from unittest import mock

from torch import Tensor

from distributed.cells.steps import built
from gptlite.config import load
from gptlite.config.saved import to_yaml
from gptlite.parallelism.in_files import PAGE
from gptlite.satellites.nvme.infinite import InfiniteStream
from gptlite.satellites.nvme.state_file import StateFile
from gptlite.trainer.eval import evaluate
from gptlite.trainer.folder import RunFolder

Cached = dict[str, tuple[int, int]]  # by phase: the most bytes that were in the page cache, and those left after it


def cached_bytes(mapped: Tensor) -> int:
    """Bytes of a mapped file in the page cache, as mincore(2) has them."""
    pages = ctypes.create_string_buffer(-(-mapped.nbytes // PAGE))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes), pages) == 0
    return PAGE * pages.raw.count(1)


class Files:
    """The mapped files of this process, and how much of them is in the page cache."""

    def __init__(self) -> None:
        self.mapped: list[Tensor] = []
        self.found: Cached = {}

    def cached(self) -> int:
        """Bytes in the page cache."""
        return sum(map(cached_bytes, list(self.mapped)))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts pages every millisecond."""
        done, most = Event(), 0

        def look() -> None:
            nonlocal most
            while not done.wait(0.001):
                most = max(most, self.cached())

        thread = Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        after = self.cached()
        self.found[phase] = max(most, after), after


@contextmanager
def files() -> Iterator[Files]:
    """The files that are mapped from here on."""
    found, mapped = Files(), StateFile.mapped

    def recorded(file: StateFile) -> Tensor:
        found.mapped.append(mapped(file))
        return found.mapped[-1]

    with mock.patch.object(StateFile, "mapped", recorded):
        yield found


def phases(overrides: list[str]) -> tuple[Cached, int, int]:
    """The cached bytes of every phase, and the sizes of the files and of a bucket of blocks."""
    config = load(overrides)
    with files() as seen, ExitStack() as stack:
        with seen.during("build"):
            mesh, state, step = stack.enter_context(built(config))
        run = RunFolder(config, mesh)
        with closing(run.checkpointer):
            for phase in ("first step", "second step"):
                with seen.during(phase):
                    assert step(state).grad_norm > 0
            with seen.during("evaluation"):
                assert evaluate(state.model, state.runner, state.loader.validation_batches(2), None) is not None
            with seen.during("save"):
                path = run.checkpointer.save(state.tensors(), state.meta(), to_yaml(config), None, print)
                run.checkpointer.finish()
            with seen.during("step after a save"):
                step(state)
            loading = RunFolder(replace(config, checkpoint=replace(config.checkpoint, resume=str(path))), mesh)
            with closing(loading.checkpointer), seen.during("load"):
                loading.restore(state)
            with seen.during("step after a load"):
                step(state)
        stream = state.optimizer.stream  # type: ignore[attr-defined]
        assert isinstance(stream, InfiniteStream)
        sizes = sum(each.nbytes for each in seen.mapped), len(stream.parameters.buffers[0])
    return seen.found, *sizes
