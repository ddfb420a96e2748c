"""Calls of rank 0 that all ranks take part in: rank 0 talks to lm-eval, the others wait for its calls."""

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
    """A Scorer whose methods rank 0 calls, on all ranks."""

    def __init__(self, scorer: Scorer, mesh: Mesh) -> None:
        self._scorer, self._mesh = scorer, mesh
        # gloo, also with GPUs: waiting in NCCL would keep them busy.
        self._group: Any = dist.new_group(backend="gloo", timeout=WAIT) if mesh.world_size > 1 else None
        self._calling = False

    def call(self, method: str, requests: list[Any]) -> list[Any]:
        """Call a method on every rank, and return its result. On rank 0."""
        self._calling = True
        self._exchange((method, requests))
        result = getattr(self._scorer, method)(requests)
        self._calling = False
        return result

    @contextmanager
    def serving(self) -> Iterator[bool]:
        """Context for rank 0, where the value is True. The other ranks run its calls first, and enter at its end."""
        if self._mesh.is_main:
            try:
                yield True
            finally:
                if not self._calling:  # after a failed call the others wait in its collectives, until this rank ends
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
