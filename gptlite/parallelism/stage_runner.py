"""Forward passes through the parts of a pipeline, for evaluation and generation.

torch's schedules run a fixed number of micro-batches of fixed shape. These passes allow any number and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.context import context_of
from gptlite.parallelism.layout import num_stages, stages_of_rank
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.tensor import axis_of
from gptlite.parallelism.zero import reshard


class StageRunner:
    """Runner for all parts of a model, of which this rank holds `parts`. Without `mesh` and `config`, `parts` is a
    whole model on one device."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        mesh: Mesh | None = None,
        config: ParallelismConfig | None = None,
    ) -> None:
        config = config or ParallelismConfig()
        self.parts, self.axis, self.context = list(parts), axis_of(parts[0]), context_of(parts[0])
        self.mesh = mesh or Mesh(next(parts[0].parameters()).device)
        self._owner = {stage: rank for rank in range(config.pipeline) for stage in stages_of_rank(config, rank)}
        self._mine = stages_of_rank(config, self.mesh.coordinate("pp"))
        self._last = num_stages(config) - 1

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self._last + 1

    @property
    def has_last(self) -> bool:
        """True if this rank holds the last part."""
        return self._last in self._mine

    def slice_length(self, length: int) -> int:
        """Return the sequence length of this rank's activations between parts, for local tokens of length `length`."""
        return length // self.axis.size if self.axis is not None and self.axis.sequence else length

    def run(
        self,
        tokens: Any,
        call: Callable[[int, nn.Module, Any], Tensor],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> Tensor | None:
        """Run all parts. Return the last part's output on the ranks that hold it, None on the others. All ranks must
        call this.

        `call(i, part, x)` applies the i-th of this rank's parts to the tokens or to the previous part's output.
        `shapes` are the input shapes of all stages; they are used only with a pipeline.
        """
        out = tokens
        for index, (stage, part) in enumerate(zip(self._mine, self.parts, strict=True)):
            if stage > 0 and self._owner[stage - 1] != self._owner[stage]:  # equal in the middle of a V schedule
                out = torch.empty(shapes[stage], dtype=dtype, device=self.mesh.device)
                dist.recv(out, self._peer(stage - 1), self.mesh.group("pp"))
            out = call(index, part, out)
            if stage < self._last and self._owner[stage + 1] != self._owner[stage]:
                dist.send(out.contiguous(), self._peer(stage + 1), self.mesh.group("pp"))
        return out if self.has_last else None

    def from_last(self, number: Callable[[], int]) -> int:
        """Call `number` on one of the ranks that hold the last part, and return its result on every rank."""
        if self.mesh.world_size == 1:
            return number()
        rank = self._owner[self._last] * self.mesh.layout.stride("pp")  # the one with coordinate 0 on all other axes
        box = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        if self.mesh.rank == rank:
            box.fill_(number())
        dist.broadcast(box, rank)
        return int(box)

    @contextmanager
    def reading(self, whole_sequence: bool = False) -> Iterator[None]:
        """Context manager that disables gradients and dropout. On exit, parameters that ZeRO has gathered are freed.

        `whole_sequence` also disables sequence and context parallelism, which cannot split a single token.
        """
        training = [part.training for part in self.parts]
        for part in self.parts:
            part.eval()
        try:
            with torch.no_grad(), ExitStack() as stack:
                for axis in (self.axis, self.context):
                    if whole_sequence and axis is not None:
                        stack.enter_context(axis.whole_sequence())
                yield
        finally:
            reshard(self.parts)
            for part, mode in zip(self.parts, training, strict=True):
                part.train(mode)

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self.mesh.group("pp"), self._owner[stage])
