"""Calls that rank 0 makes on all ranks. Only rank 0 runs lm-eval; the other ranks wait for its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gptlite.harness.scorer import Scorer
from gptlite.parallelism.mesh import Mesh

WAIT = timedelta(days=7)  # rank 0 may download data sets between two calls


class SharedScorer:
    """Scorer whose methods run on all ranks when rank 0 calls them."""

    def __init__(self, scorer: Scorer, mesh: Mesh) -> None:
        self._scorer, self._mesh = scorer, mesh
        # gloo even with GPUs, as waiting in NCCL would keep the GPUs busy.
        self._group: Any = dist.new_group(backend="gloo", timeout=WAIT) if mesh.world_size > 1 else None
        self._calling = False

    def call(self, method: str, requests: list[Any]) -> list[Any]:
        """Call a method on every rank, and return its result. Only rank 0 may call this."""
        self._calling = True
        self._exchange((method, requests))
        result = getattr(self._scorer, method)(requests)
        self._calling = False
        return result

    @contextmanager
    def serving(self) -> Iterator[bool]:
        """Context manager with the value True on rank 0. The other ranks run the calls that rank 0 makes in its block,
        and enter their own block, with the value False, when rank 0 leaves it."""
        if self._mesh.is_main:
            try:
                yield True
            finally:
                if not self._calling:  # after a failed call, the others wait in its collectives until this rank exits
                    self._exchange(None)
            return
        while (asked := self._exchange(None)) is not None:
            method, requests = asked
            getattr(self._scorer, method)(requests)
        yield False

    def _exchange(self, message: tuple[str, list[Any]] | None) -> tuple[str, list[Any]] | None:
        """Return rank 0's message on every rank."""
        if self._group is None:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
