"""Calls that rank 0 makes on all ranks. Only rank 0 runs lm-eval; the other ranks wait for its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gptlite.models.capabilities import Sampling
from gptlite.parallelism.collectives import broadcast_bytes
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.messages import decode, encode
from gptlite.satellites.harness.scorer import Prompt, Scored, Scorer

WAIT = timedelta(days=7)  # rank 0 may download data sets between two calls


class SharedScorer:
    """Scorer whose methods run on all ranks when rank 0 calls them."""

    def __init__(self, scorer: Scorer, mesh: Mesh) -> None:
        self._scorer, self._mesh = scorer, mesh
        # gloo even with GPUs, as waiting in NCCL would keep the GPUs busy.
        self._group: Any = dist.new_group(backend="gloo", timeout=WAIT) if mesh.world_size > 1 else None
        self._calling = False

    def score(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Call Scorer.score on every rank, and return its result. Only rank 0 may call this."""
        with self._called("score", [tuple(each) for each in requests]):
            return self._scorer.score(requests)

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """Call Scorer.generate on every rank, and return its result. Only rank 0 may call this."""
        with self._called("generate", [(*each[:-1], astuple(each.sampling)) for each in prompts]):
            return self._scorer.generate(prompts)

    @contextmanager
    def _called(self, method: str, requests: list[Any]) -> Iterator[None]:
        self._calling = True
        self._exchange((method, requests))
        yield
        self._calling = False

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
            match asked:
                case "score", list(requests):
                    self._scorer.score([Scored(*each) for each in requests])
                case "generate", list(requests):
                    prompts = [Prompt(tokens, most, until, Sampling(*how)) for tokens, most, until, how in requests]
                    self._scorer.generate(prompts)
                case _:
                    raise RuntimeError("rank 0 sent a call that there is not")
        yield False

    def _exchange(self, message: tuple[str, list[Any]] | None) -> Any:
        """Return rank 0's message on every rank."""
        return message if self._group is None else decode(broadcast_bytes(encode(message), self._group))
