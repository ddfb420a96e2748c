"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): sums of gradients as matrices of low rank, with error feedback.

M_i [n, m] is rank i's gradient of a matrix plus its error. The ranks sum P = sum M_i Q, orthonormalize P [n, r], and
sum Q = sum M_i' P [m, r]. All take P Q' for the sum of the M_i, rank i keeps the error M_i - P (M_i' P)', and the next
step begins with this Q. Vectors, and matrices whose factors would be no smaller, are summed as they are. All is sent in
fp32 and added in rank order, so sums have equal bits on all ranks, and copies on several tensor ranks stay equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.reduction import PREFIX
from gptlite.parallelism.tensor import is_cut
from gptlite.satellites.compressed.buckets import Bucket
from gptlite.satellites.compressed.errors import Errors, shape_over
from gptlite.satellites.compressed.gradients import CompressedReduction
from gptlite.satellites.compressed.sums import all_reduce, all_reduce_bytes

KEYS = f"{PREFIX}factors."  # of each Q in checkpoints


@dataclass(frozen=True)
class Uncoded:
    """fp32 values, as a codec of blocks of one value."""

    name: str
    width: int = 1

    def message_bytes(self, blocks: int) -> int:
        """Return the length of the message of so many values."""
        return 4 * blocks

    def encode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the message of x [blocks, 1]."""
        return x.reshape(-1).view(torch.uint8)

    def decode(self, message: Tensor, blocks: int, mask: Tensor | None = None) -> Tensor:
        """Return values [blocks, 1], fp32."""
        return message.view(torch.float32).view(blocks, 1)


def factor_values(shapes: Iterable[tuple[int, int]], rank: int) -> tuple[int, int]:
    """Return the numbers of values in the two sums of a bucket of parameters with these rows and columns."""
    first = second = 0
    for rows, columns in shapes:
        low = pays(rows, columns, rank)
        first, second = first + rows * (rank if low else columns), second + low * columns * rank
    return first, second


class LowRankReduction(CompressedReduction):
    """Sums over the replicas, for ZeRO 0 and HSDP, as matrices of rank `rank`."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, sequence: bool) -> None:
        super().__init__(mesh, Uncoded(f"powersgd of rank {rank}"), device, sequence)
        self._rank = rank
        self._factors: dict[nn.Parameter, Tensor] = {}  # Q of each matrix

    def bind(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        """Create the errors, zeros, and the factors Q, which depend on the parameter's name alone. Collective."""
        super().bind(parameters, optimizer)
        for held in self._errors.values():
            for parameter, (rows, columns) in zip(held.parameters, self._shapes(held), strict=True):
                if pays(rows, columns, self._rank):
                    seed = int.from_bytes(hashlib.sha256(self._lanes[parameter].name.encode()).digest()[:8]) >> 1
                    first = torch.randn(columns, self._rank, generator=torch.Generator().manual_seed(seed))
                    self._factors[parameter] = first.to(self.mesh.device)

    def sum(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum this rank's row [n] in place over the ranks that hold copies of it."""
        held = self._errors[bucket]
        errors = held.values.to(flat.device)
        values = held.pack(bucket.row(flat)).add_(errors)
        parts, missing = ([view[0] for view in held.views(each)] for each in (values, errors))
        shapes = self._shapes(held)
        low = [at for at, shape in enumerate(shapes) if pays(*shape, self._rank)]
        whole = [at for at in range(len(parts)) if at not in low]
        matrices = {at: parts[at].view(shapes[at]) for at in low}
        products = (matrices[at] @ self._factors[held.parameters[at]] for at in low)
        sums = self._summed([*products, *(parts[at] for at in whole)], group)
        for at, total in zip(whole, sums[len(low) :], strict=True):
            parts[at].copy_(total)
            missing[at].zero_()
        left = [torch.linalg.qr(total).Q for total in sums[: len(low)]]
        own = [matrices[at].T @ p for at, p in zip(low, left, strict=True)]
        for at, p, mine, q in zip(low, left, own, self._summed(own, group), strict=True):
            missing[at].copy_((matrices[at] - p @ mine.T).view(-1))
            parts[at].copy_((p @ q.T).view(-1))
            self._factors[held.parameters[at]] = torch.where(q.any(0), q, 1.0)  # zeros, of a gradient of 0, would stay
        flat.copy_(held.unpack(values))
        if errors is not held.values:
            held.values.copy_(errors)

    def step_bytes(self, passes: int) -> tuple[int, int]:
        """Return the bytes that this rank sends in a step, and those that it would send of fp32 gradients: a ring's."""
        sums = (factor_values(self._shapes(held), self._rank) for held in self._errors.values())
        blocks = [-(-values // self._replicas) for both in sums for values in both]
        return sum(all_reduce_bytes(self.codec, each, self._replicas) for each in blocks), super().step_bytes(passes)[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the errors, and each Q under `errors.factors.<shape>.<place>.<parameter name>`."""
        return super().tensors() | {self._key(parameter): factor for parameter, factor in self._factors.items()}

    def requested(self, stored: Collection[str]) -> dict[str, Tensor]:
        """Return tensors for the stored errors, and for each Q that a rank of this one's place has stored."""
        keys = {self._key(parameter): factor for parameter, factor in self._factors.items()}
        return super().requested(stored) | {key: torch.empty_like(keys[key]) for key in keys.keys() & set(stored)}

    def take(self, tensors: dict[str, Tensor]) -> list[str]:
        """Set errors and factors. A Q that is not stored, as on another layout, stays as it is: any Q will do."""
        for parameter in self._factors:
            self._factors[parameter] = tensors.get(self._key(parameter), self._factors[parameter])
        return super().take({key: each for key, each in tensors.items() if not key.startswith(KEYS)})

    def _shapes(self, held: Errors) -> list[tuple[int, int]]:
        """Return the rows and columns of each parameter's part of a bucket. A vector has one column."""
        columns = [max(1, math.prod(shape_over(parameter, self._axis)[1:])) for parameter in held.parameters]
        return [(size // count, count) for size, count in zip(held.sizes, columns, strict=True)]

    def _key(self, parameter: nn.Parameter) -> str:
        lane, (columns, rank) = self._lanes[parameter], self._factors[parameter].shape
        slice_ = self.mesh.coordinate("tp") if is_cut(parameter) else 0
        place = f"{lane.index % (lane.count // self._replicas)}-{slice_}-{self.mesh.coordinate('dp_shard')}"
        return f"{KEYS}{columns}x{rank}.{place}.{lane.name}"

    def _summed(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Return the sums of tensors over the ranks."""
        if not tensors:
            return []
        flat = torch.cat([each.reshape(-1) for each in tensors])
        chunks = nn.functional.pad(flat, (0, -flat.numel() % group.size())).view(group.size(), -1, 1)
        total = all_reduce(chunks, torch.zeros_like(chunks), self.codec, group, counted=self.counted).view(-1)
        parts = total.split([*(each.numel() for each in tensors), total.numel() - flat.numel()])
        return [part.view_as(each) for part, each in zip(parts, tensors, strict=False)]


def pays(rows: int, columns: int, rank: int) -> bool:
    """Return True if a matrix's factors are smaller than the matrix."""
    return (rows + columns) * rank < rows * columns
