"""Sums of gradients, losses and squares over micro-batches and data ranks that do not depend on their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Adam, AdamW, Optimizer

from gptlite.errors import RunEnded
from gptlite.optimizer.base import local_gradients
from gptlite.parallelism.axes import DATA_AXES
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.collectives import all_reduce, gather_objects
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.point_to_point import PairwiseReduceScatter
from gptlite.satellites.compressed.buckets import Bucket, BucketReduction
from gptlite.satellites.deterministic.exact import (
    GRADIENT_UNIT,
    LOSS_UNIT,
    add,
    largest,
    limit_of,
    rounded,
    scale_of,
    square_of,
    square_sums,
)
from gptlite.torch_private.distributed import reduce_scatter_single


class TooLarge(RunEnded):
    """Raised if a sample's gradient or loss exceeds what its exact sum can hold."""

    advice = (
        ". Stopped with the parameters of the previous step; earlier checkpoints are intact. Try a lower "
        "optimizer.lr (now {lr:g}), more schedule.warmup_steps, or parallelism.deterministic=false"
    )


class ExactReduction(BucketReduction):
    """Exact sums of the gradients of single samples, rounded to fp32 once a step.

    `zero`: ZeRO stage. From stage 2 on, a sample's gradient is reduce-scattered at once, so that a rank keeps the sums
    of its shards; below, it keeps those of all gradients until the last backward pass. `samples`: number of samples in
    a step.

    A sum takes 16 bytes an element (exact.py). FSDP2 gets zeros as a pass's gradients, and the sum in the last pass.
    Parameters outside FSDP2 are summed by hooks: all of them on one data rank, else those without dims.
    """

    def __init__(self, mesh: Mesh, zero: int, samples: int) -> None:
        super().__init__(mesh)
        self.zero = zero
        self.limit, self.loss_limit = limit_of(GRADIENT_UNIT, samples), limit_of(LOSS_UNIT, samples)
        self._sums: dict[Bucket | nn.Parameter, Tensor] = {}  # [rows, 2, n] of this step
        self._names: dict[int, str] = {}  # of parameters, by id
        self._exceeded: list[Tensor] = []  # bool scalars of this step
        self._alone: list[nn.Parameter] = []

    def attach(self, module: FSDPModule) -> None:
        """Replace the sums of a module, and reduce its gradients after each of its backward passes."""
        known = self.attached(module)
        super().attach(module)
        bucket = self.attached(module)
        if bucket is not None and known is None:
            bucket.group.reduce_every_pass()
        if bucket is not None and bucket.rows == self.mesh.size("dp_replicate") == 1:  # one rank, which offloads
            module.set_all_reduce_hook(lambda flat: self.over_replicas(bucket, flat))

    def bind(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        """Receive this rank's parameters, and sum those that FSDP2 does not reduce."""
        for rule in (optimizer, getattr(optimizer, "adamw", optimizer)):  # Muon's AdamW, if any
            on_host = all(p.device.type == "cpu" for group in rule.param_groups for p in group["params"])
            if type(rule) in (Adam, AdamW, SGD) and on_host:
                # torch's fused CPU updates round differently in the last elements of a shard.
                for group in (rule.defaults, *rule.param_groups):
                    group["fused"] = False
        reduced = {id(each) for bucket in self.buckets for each in bucket.registered()}
        for name, parameter in parameters:
            if id(parameter) not in self._names and id(parameter) not in reduced and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._add_alone)
                self._alone.append(parameter)
            self._names[id(parameter)] = name

    @torch.no_grad()
    def scatter(self, bucket: Bucket, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Add a sample's gradients [rows * n], and write this rank's row [n] of the sums to `out` in the last pass,
        unless replicas have to be added. Otherwise write zeros."""
        if self.zero >= 2:
            sums = torch.zeros(bucket.rows, 2, flat.numel() // bucket.rows, dtype=torch.float64, device=flat.device)
            self._add(sums, bucket.row(flat))
            self._total(bucket, (1, *sums.shape[1:]), flat)[0] += _scattered(sums, group)
        else:
            self._add(self._total(bucket, (bucket.rows, 2, flat.numel() // bucket.rows), flat), bucket.row(flat))
            if bucket.last:
                self._sums[bucket] = _scattered(self._sums[bucket], group)[None]
        if bucket.last and self.mesh.size("dp_replicate") == 1:
            out.copy_(rounded(self._sums.pop(bucket)[0]))
        else:
            out.zero_()

    @torch.no_grad()
    def over_replicas(self, bucket: Bucket, flat: Tensor) -> None:
        """Write this rank's row [n] of the sums over samples, ranks and replicas to `flat` in the last pass. If there
        is one row, `flat` is a sample's gradient until then."""
        if bucket.rows == 1:
            self._add(self._total(bucket, (1, 2, flat.numel()), flat), bucket.row(flat))
        if bucket.last:
            sums = self._sums.pop(bucket)[0]
            if sums.is_cuda:  # allocated on the stream of the reduce-scatters, which does not wait for this one
                sums.record_stream(torch.cuda.current_stream())
            flat.copy_(rounded(all_reduce(sums, self.mesh, ["dp_replicate"])))
        else:
            flat.zero_()

    @torch.no_grad()
    def complete(self, losses: Sequence[Tensor], zero: Tensor) -> Tensor:
        """Round the sums outside FSDP2, and return the exact sum of the losses of all data ranks, fp64, on the first
        of them; 0 on the others, so that their sum is exact as well. Collective."""
        first = all(self.mesh.coordinate(axis) == 0 for axis in DATA_AXES)
        for parameter in self._alone:
            if self.mesh.fsdp_size > 1:  # a scalar, whose gradients zero.sum_scalars adds next
                sums = all_reduce(self._total(parameter, (1, 2, 1), local_tensor(parameter)), self.mesh, DATA_AXES)
                if not first:
                    sums.zero_()
            if (found := self._sums.pop(parameter, None)) is not None:
                parameter.grad = torch.empty_like(parameter, dtype=torch.float32)
                local_tensor(parameter.grad).view(-1).copy_(rounded(found[0]))
        total = torch.zeros(1, 2, 1, dtype=torch.float64, device=zero.device)
        for loss in losses:
            add(total, loss.float().masked_fill(loss.abs() > self.loss_limit, torch.inf).view(1, 1), LOSS_UNIT)
        total = all_reduce(total, self.mesh, DATA_AXES)
        return total.sum() if first else zero.double()

    @torch.no_grad()
    def gradient_square(self, counted: Iterable[nn.Parameter], dense: Callable[[], Tensor]) -> Tensor:
        """Return the exact squared norm on the first rank, and 0 on the others. Collective. Raises TooLarge."""
        held = list(counted)
        gradients, device = local_gradients(held), self.mesh.device
        most = all_reduce(largest(gradients, device), self.mesh, op="max")
        self._refuse_large(held, most)
        scale = scale_of(most)
        square = square_of(all_reduce(square_sums(gradients, scale), self.mesh), scale)
        square = torch.where(most.isfinite(), square, most)  # the windows hold no infinite square
        return square if self.mesh.rank == 0 else torch.zeros_like(square)

    def _total(self, key: Bucket | nn.Parameter, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the sums of this step, zeros at first."""
        if key not in self._sums:
            self._sums[key] = torch.zeros(shape, dtype=torch.float64, device=like.device)
        return self._sums[key]

    def _add(self, sums: Tensor, rows: Tensor) -> None:
        """Add a sample's gradients [rows, n] to sums [rows, 2, n]. Those out of range count as infinite."""
        # A GPU would have to wait for the largest.
        if rows.device.type != "cpu" or (rows.numel() and not rows.abs().amax() <= self.limit):
            above = rows.abs() > self.limit
            self._exceeded.append((above & rows.isfinite()).any())
            rows = rows.masked_fill(above, torch.inf)
        add(sums, rows, GRADIENT_UNIT)

    def _add_alone(self, parameter: nn.Parameter) -> None:
        """Move the gradient of a backward pass to the sums."""
        assert parameter.grad is not None
        row = local_tensor(parameter.grad).float().reshape(1, -1)
        self._add(self._total(parameter, (1, 2, row.numel()), row), row)
        parameter.grad = None

    def _refuse_large(self, held: Sequence[nn.Parameter], most: Tensor) -> None:
        """Raise TooLarge on all ranks if the largest gradient is infinite because of its exact sum."""
        exceeded, self._exceeded = self._exceeded, []
        if most.isfinite():
            return
        own = []
        for parameter in held if any(exceeded) else ():
            if parameter.grad is not None and not local_tensor(parameter.grad).isfinite().all():
                own.append(self._names[id(parameter)])
        found = [any(exceeded), *own]
        every = gather_objects(self.mesh, found)
        if any(each[0] for each in every):
            names = [name for each in every for name in each[1:]]
            where = names[0] if names else "a parameter"
            raise TooLarge(
                f"parallelism.deterministic=true: a sample's share of the gradient of {where} exceeds "
                f"{self.limit:g}, the most that an exact sum can hold"
            )


def _scattered(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's row [2, n] of the sums [ranks, 2, n] over a group. The order of additions does not matter."""
    out = torch.empty_like(sums[0])
    if sums.device.type == "cpu":
        PairwiseReduceScatter()(out.view(-1), sums.view(-1), group, dist.ReduceOp.SUM)
    else:
        reduce_scatter_single(out.view(-1), sums.view(-1), group)
    return out
