"""Reduction of a run with a 1-bit optimizer: dense in its warm-up, later none, as the optimizer exchanges momenta."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.config.schema import Config
from gptlite.optimizer.base import local_gradients
from gptlite.optimizer.clip import square_norms
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.pipeline import add_across_ends
from gptlite.parallelism.reduction import PREFIX
from gptlite.parallelism.tensor import axis_of, is_cut, sum_sliced_gradients
from gptlite.satellites.compressed.buckets import Bucket, BucketReduction
from gptlite.satellites.compressed.errors import shape_over, wrapped_over
from gptlite.satellites.onebit.adam import OneBitAdam
from gptlite.satellites.onebit.lamb import OneBitLamb
from gptlite.satellites.onebit.momenta import Exchange, Vector
from gptlite.satellites.onebit.zero_one import ZeroOneAdam

KEYS = f"{PREFIX}momenta."  # of checkpoints; errors of compressed gradients are of another quantity


def build_reduction(config: Config, mesh: Mesh) -> OneBitReduction | None:
    """Return the reduction of a run with a 1-bit optimizer; None if nothing is summed."""
    return OneBitReduction(mesh) if mesh.fsdp_size > 1 else None


@dataclass
class _Own:
    """A parameter's whole gradient on this rank, where the functions for parameters read it."""

    grad: Tensor


class OneBitReduction(BucketReduction):
    """Dense sums in the steps in which the optimizer does not exchange momenta, and in all others none: a rank keeps
    its own gradients for the optimizer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._kept: dict[Bucket, Tensor] = {}  # this rank's gradients [rows, n], with ZeRO 1
        self._own: bool | None = None  # True if ranks keep their gradients in this step; None: not asked yet

    def bind(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        """Let the optimizer exchange momenta over the data ranks."""
        assert isinstance(optimizer, OneBitAdam | OneBitLamb)
        self.optimizer, self.exchange = optimizer, Exchange(self.mesh, parameters)
        optimizer.momenta = self.exchange

    def scatter(self, bucket: Bucket, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum over the ranks that shard the bucket, or keep this rank's gradients of the whole bucket (ZeRO 1)."""
        if not (self.exchange.whole and self._keeps()):
            return super().scatter(bucket, out, flat, group)
        rows = bucket.row(flat)
        out.copy_(rows[self.exchange.lane])
        self._kept[bucket] = rows.float() + self._kept[bucket] if bucket in self._kept else rows.float().clone()

    def sum(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum over the ranks that hold copies, or leave this rank's gradients as they are."""
        if not self._keeps():
            super().sum(bucket, flat, group)

    def gradient_square(self, counted: Iterable[nn.Parameter], dense: Callable[[], Tensor]) -> Tensor:
        """Return this rank's share of W sum_i |g_i|^2 over the data ranks i, fp64: the square of the root mean square
        of the norms of W g_i. It is that of the gradient if all g_i are equal, and larger otherwise."""
        keeps, self._own = self._keeps(), None
        if not keeps:
            return dense()
        exchange, counted = self.exchange, list(counted)
        if exchange.whole:
            exchange.gradients = self._whole_gradients()
        gradients = [exchange.gradient(each) for each in exchange.parameters]
        present = [each for each in gradients if each is not None and each.numel()]
        norms = iter(square_norms(present)) if present else iter(())
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        squares = torch.stack([zero if each is None or not each.numel() else next(norms) for each in gradients])
        if not exchange.whole:  # all replicas count, but only the first has parameters in `counted`
            dist.all_reduce(squares, group=exchange.group)
        by_parameter = dict(zip(exchange.parameters, squares.unbind(), strict=True))
        total = sum((exchange.size * by_parameter[each] for each in counted if each in by_parameter), zero)
        for scalar in local_gradients(each for each in counted if each in exchange.scalars):
            total = total + scalar.double().square()
        return total

    @property
    def apart(self) -> bool:  # type: ignore[override]
        """True between two exchanges of 0/1 Adam."""
        return self.exchange.pending is not None

    def settle(self) -> None:
        """Exchange the steps that ranks have taken since the last exchange."""
        if isinstance(self.optimizer, ZeroOneAdam):
            self.optimizer.settle()

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's errors, as `errors.momenta.<its index>.<parameter>`; none before the first exchange."""
        return {
            f"{KEYS}{self.exchange.lane}.{name}": wrapped_over(parameter, view, self.exchange.axis, self.mesh)
            for vector in self.exchange.vectors
            if vector.errors is not None
            for name, parameter, view in self._errors(vector)
        }

    def requested(self, stored: Collection[str]) -> dict[str, Tensor]:
        """Return tensors for the errors that this rank takes: those of the ranks with the same index modulo W."""
        exchange = self.exchange
        lanes = sorted({int(_place(key)[0]) for key in stored if key.startswith(KEYS)})
        self._note = ""
        if lanes and len(lanes) != exchange.size:
            self._note = f"the compression errors of {len(lanes)} data ranks are summed for {exchange.size}"
        vectors = (zip(each.names, each.parameters, each.shapes, strict=True) for each in exchange.vectors)
        named = [place for vector in vectors for place in vector]
        return {
            key: wrapped_over(parameter, torch.zeros(shape, device=self.mesh.device), exchange.axis, self.mesh)
            for lane in lanes
            if lane % exchange.size == exchange.lane
            for name, parameter, shape in named
            if (key := f"{KEYS}{lane}.{name}") in stored
        }

    def take(self, tensors: dict[str, Tensor]) -> list[str]:
        """Set the errors to the sums of the tensors of each parameter, and forget what depended on former state."""
        self.exchange.refreshed()
        self._own, self._kept = None, {}
        for vector in self.exchange.vectors:
            vector.errors = vector.layout.new(self.mesh.device) if tensors else None
            for name, _, view in self._errors(vector) if tensors else ():
                for key, tensor in tensors.items():
                    if _place(key)[1] == name:
                        view += local_tensor(tensor)
        return [self._note] if self._note else []

    def _keeps(self) -> bool:
        if self._own is None:
            self._own = self.optimizer.exchanges
        return self._own

    @staticmethod
    def _errors(vector: Vector) -> Iterable[tuple[str, nn.Parameter, Tensor]]:
        assert vector.errors is not None
        return zip(vector.names, vector.parameters, vector.views(vector.errors), strict=True)

    def _whole_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's own gradients, after the sums that `finish_gradients` does for the shards of parameters.
        Collective over the tensor ranks and the ends of the pipeline."""
        own: dict[nn.Parameter, _Own] = {}
        for bucket in self.buckets:
            for parameter, part in zip(bucket.parameters, self._kept[bucket].split(bucket.sizes, dim=1), strict=True):
                shape = shape_over(parameter, self.exchange.axis)
                own[parameter] = _Own(part.reshape(-1, *shape[1:])[: shape[0]])
        self._kept = {}
        axis = next((axis for each in self.buckets if (axis := axis_of(each.module)) is not None), None)  # type: ignore[arg-type]
        if axis is not None and self.mesh.size("tp") > 1:
            partial = self._partial(axis.sequence)
            sum_sliced_gradients([each for parameter, each in own.items() if parameter in partial], axis)  # type: ignore[misc]
        for parameters in self.exchange.tied:
            held = [own[parameter] for parameter in parameters]
            first, last = held if len(held) == 2 else [*held, None]
            ends = (first, last) if last is not None or self.mesh.coordinate("pp") == 0 else (None, first)
            add_across_ends(*ends, self.mesh)  # type: ignore[arg-type]
        return {parameter: each.grad for parameter, each in own.items()}

    def _partial(self, sequence: bool) -> set[nn.Parameter]:
        """Return the parameters of whose gradients tensor ranks have parts."""
        modules = [module for bucket in self.buckets for module in bucket.module.modules()]  # type: ignore[attr-defined]
        some = [module for module in modules if sequence or getattr(module, "of_heads", False) is True]
        return {parameter for module in some for parameter in module.parameters() if not is_cut(parameter)}


def _place(key: str) -> tuple[str, str]:
    """Return the rank's index and the parameter's name of a key of `tensors`."""
    index, _, name = key.removeprefix(KEYS).partition(".")
    return index, name
