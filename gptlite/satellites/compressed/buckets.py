"""Base class of the reductions: FSDP2's buckets as flat tensors, summed densely.

FSDP2 copies a bucket's gradients into one tensor [rows, n], in which row r holds the dim-0 chunks of all parameters
that rank r of `dp_shard` stores (zero-padded to equal sizes), reduce-scatters it, and hands this rank's row [n] to the
all-reduce hook. With ZeRO 0, and with replicas (HSDP), the hook sums over `dp_replicate`.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.point_to_point import PairwiseReduceScatter
from gptlite.parallelism.reduction import Reduction
from gptlite.torch_private.distributed import reduce_scatter_single
from gptlite.torch_private.fsdp_shards import Group, group_of


class Bucket:
    """Parameters of `group`, whose gradients FSDP2 reduces together, over `rows` ranks of `dp_shard`. `module` is one
    of the modules that have them."""

    def __init__(self, module: FSDPModule, group: Group, rows: int) -> None:
        self.module, self.group, self.rows = module, group, rows
        self.pending: Tensor | None = None  # sum of the micro-batches so far, not yet summed over the replicas

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sharded parameters, in the order of the flat tensor."""
        return self.group.trained

    def registered(self) -> list[nn.Parameter]:
        """Return the same before the first forward pass, until which FSDP2 keeps those on the meta device."""
        return self.group.registered

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter in one row, with padding."""
        return self.group.trained_sizes

    @property
    def last(self) -> bool:
        """True in the last backward pass of a step."""
        return self.group.last

    def row(self, flat: Tensor) -> Tensor:
        """Return the flat gradients [rows * n] or [n] as [rows, n] or [1, n]. Raises RuntimeError if a parameter has no
        gradient, which FSDP2 leaves out."""
        n = sum(self.sizes)
        if flat.numel() % n or flat.numel() // n not in (1, self.rows):
            raise RuntimeError(f"a bucket has {flat.numel()} gradient elements, not {n} a rank: a parameter has none")
        return flat.view(-1, n)


class BucketReduction(Reduction):
    """Sums of buckets over the data ranks. Subclasses override `scatter` and `sum`, which here are dense.

    `observers` are called with a bucket and this rank's gradients [rows * n], before they are summed.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.observers: list[Callable[[Bucket, Tensor], None]] = []
        self.buckets: list[Bucket] = []

    def attach(self, module: FSDPModule) -> None:
        """Replace the sums of a module that is sharded along `dp_shard` alone, unless it has no parameters of its own.

        Modules that share a bucket (`bucket_layers`) are attached one by one, each after `zero.shard` has set its
        own sums for the bucket.
        """
        if (group := group_of(module)) is None:
            return
        bucket = self.attached(module)
        if bucket is None:
            bucket = Bucket(module, group, self.mesh.size("dp_shard"))
            self.buckets.append(bucket)
        if bucket.rows > 1:
            module.set_custom_reduce_scatter(_ReduceScatter(self, bucket))  # type: ignore[arg-type]
        if self.mesh.size("dp_replicate") > 1:
            module.set_all_reduce_hook(partial(self.over_replicas, bucket))

    def attached(self, module: FSDPModule) -> Bucket | None:
        """Return the bucket of a module, if it has one."""
        group = group_of(module)
        return next((bucket for bucket in self.buckets if bucket.group == group), None)

    def scatter(self, bucket: Bucket, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum [rows * n] over the ranks that shard the bucket, and write this rank's row [n] to `out`."""
        if flat.device.type == "cpu":
            PairwiseReduceScatter()(out, flat, group, dist.ReduceOp.SUM)
        else:
            reduce_scatter_single(out, flat, group)

    def sum(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum this rank's row [n] in place over the ranks that hold copies of it."""
        dist.all_reduce(flat, group=group)

    def over_replicas(self, bucket: Bucket, flat: Tensor) -> None:
        """Sum over the replicas once a step, although FSDP2 calls its hook after every reduce-scatter."""
        if bucket.rows == 1:
            self.observe(bucket, flat)
        if bucket.pending is not None:
            flat += bucket.pending
            bucket.pending = None
        if bucket.last:
            self.sum(bucket, flat, self.mesh.group("dp_replicate"))
        else:
            bucket.pending = flat.clone()
            flat.zero_()

    def observe(self, bucket: Bucket, flat: Tensor) -> None:
        """Call the observers."""
        for observer in self.observers:
            observer(bucket, flat)


class _ReduceScatter:
    """Reduce-scatter in FSDP2's interface."""

    def __init__(self, reduction: BucketReduction, bucket: Bucket) -> None:
        self._reduction, self._bucket = reduction, bucket

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a message buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        self._reduction.observe(self._bucket, input_tensor)
        self._reduction.scatter(self._bucket, output_tensor, input_tensor, group)
