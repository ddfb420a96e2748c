"""Training steps replayed from records: `Step.execute` of a run with a CUDA graph."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptlite.data.batch_loader import Batch
from gptlite.errors import one_line
from gptlite.ops.weight_copies import copy_of, mark_written
from gptlite.parallelism.boxes import local_tensor
from gptlite.progress import Log
from gptlite.satellites.graph.recorder import Recorder
from gptlite.torch_private.ops import version_of
from gptlite.trainer.loss_scale import Decisions
from gptlite.trainer.state import TrainState
from gptlite.trainer.totals import StepTotals

WARM_STEPS = 3  # steps of a shape before it is recorded: they compile, choose kernels and create the optimizer's state
RECORDS = 4  # shapes of a batch whose records are kept; documents have few, and a ramp does not return to a shape

Result = tuple[StepTotals, Tensor]


@dataclass
class Recorded:
    """A recorded step: its inputs, which each step fills, its results, and the function that executes it."""

    inputs: list[Tensor]
    result: Result
    replay: Callable[[], Any]


class RecordedSteps:
    """Execution of steps. The first steps of each shape of batch run one operation at a time, on the recorder's stream.
    The next one is recorded, and replayed from then on.

    A record holds addresses. If anything else than a step has written or replaced a weight or the optimizer's state,
    the records are dropped, and the next steps run as the first ones did. If recording fails, for example because the
    model reads a value on the host, `log` gets the reason, and no step is recorded from then on.
    """

    def __init__(self, recorder: Recorder, log: Log) -> None:
        self._recorder, self._log, self._failed = recorder, log, False
        self._records: dict[Any, Recorded] = {}
        self._warmed: dict[Any, int] = {}
        self._held: list[Any] = []

    def __call__(
        self,
        step: Callable[[TrainState, Sequence[Batch], Decisions], Result],
        state: TrainState,
        batches: Sequence[Batch],
        decisions: Decisions,
    ) -> Result:
        """Execute a step, see Step.execute. The result's tensors are valid until the next call."""
        if self._failed:
            return step(state, batches, decisions)
        inputs = _tensors(batches)
        shape = _shape(batches, inputs)
        if self._records and self._held != _held(state):
            self._records.clear()
            self._warmed.clear()
        if shape not in self._records:
            if self._warmed.get(shape, 0) < WARM_STEPS:
                self._warmed[shape] = self._warmed.get(shape, 0) + 1
                result = self._recorder.warm(lambda: step(state, batches, decisions))
                self._held = _held(state)  # a step leaves the records of other shapes as valid as they were
                return result
            try:
                self._record(shape, step, state, batches, decisions)
            except RuntimeError as error:  # what CUDA raises for an operation that cannot be captured
                self._failed = True
                self._records.clear()
                self._log(f"warning: no CUDA graph: {one_line(error)}; steps are enqueued one operation at a time")
                return step(state, batches, decisions)
        record = self._records[shape]
        for mine, new in zip(record.inputs, inputs, strict=True):
            mine.copy_(new)
        record.replay()
        _mark_updated(state)
        self._held = _held(state)
        return record.result

    def _record(
        self,
        shape: Any,
        step: Callable[[TrainState, Sequence[Batch], Decisions], Result],
        state: TrainState,
        batches: Sequence[Batch],
        decisions: Decisions,
    ) -> None:
        """Record a step of this shape. Raises RuntimeError if it cannot be recorded."""
        if len(self._records) == RECORDS:
            del self._records[next(iter(self._records))]  # the oldest
        for group in state.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):  # set_lr fills it before each step
                group["lr"] = torch.full((), group["lr"], dtype=torch.float64, device=batches[0].targets.device)
        mine = [batch.each(Tensor.clone) for batch in batches]
        _mark_updated(state)  # else an evaluation may have quantized weights, which the record would not do again
        result, replay = self._recorder.record(lambda: step(state, mine, decisions))
        self._records[shape] = Recorded(_tensors(mine), result, replay)


def _tensors(batches: Sequence[Batch]) -> list[Tensor]:
    """Return all tensors of the batches."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for batch in batches:
        batch.each(take)
    return tensors


def _shape(batches: Sequence[Batch], inputs: Sequence[Tensor]) -> Any:
    """Return what must be equal for a record to fit: the tensors' shapes, and the bound on documents' lengths."""
    longest = [None if batch.documents is None else batch.documents.longest for batch in batches]
    return tuple(tensor.shape for tensor in inputs), tuple(longest)


def _mark_updated(state: TrainState) -> None:
    """Raise the versions of weights, as the update of a step does on the host. Their 16-bit copies stay valid, since
    the update writes them too; what else was computed from the weights becomes stale."""
    weights = [parameter for part in state.parts for parameter in part.parameters()]
    copied = [weight for weight in weights if copy_of(weight) is not None]
    torch.autograd.graph.increment_version(weights)
    mark_written(copied)


def _held(state: TrainState) -> list[Any]:
    """Return the addresses of weights, buffers and the optimizer's state, the versions of weights, and which weights
    have a valid 16-bit copy."""
    return [*_of_weights(state), *(each.data_ptr() for each in _state_tensors(state))]


def _of_weights(state: TrainState) -> Iterator[Any]:
    for part in state.parts:
        for parameter in part.parameters():
            yield local_tensor(parameter).data_ptr(), version_of(parameter), copy_of(parameter) is None
        for buffer in part.buffers():
            yield buffer.data_ptr()


def _state_tensors(state: TrainState) -> Iterator[Tensor]:
    for values in state.optimizer.state.values():
        yield from (local_tensor(value) for value in values.values() if isinstance(value, Tensor))
