"""Batch normalization with statistics over all data ranks. The statistics are the same on every layout on which the
ranks' micro-batches together have the same samples.

torch's SyncBatchNorm does not run on CPUs, and the statistics of nn.BatchNorm2d depend on the number of data ranks.
Method: Ioffe & Szegedy 2015, arXiv:1502.03167, with the mean and variance of all ranks' samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.parallelism.axes import DATA_AXES
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.mesh import Mesh
from gptlite.torch_private.modules import BatchNorm, share_tensors


class _SumOverRanks(torch.autograd.Function):
    """Sum over the data ranks. Every rank's loss depends on the sum, so gradients are also summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return all_reduce(x.clone(), mesh, DATA_AXES)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].clone(), ctx.mesh, DATA_AXES), None


class SyncedBatchNorm(BatchNorm):
    """Batch normalization of x [B, C, ...] with the mean and variance of the micro-batches of all data ranks.

    It replaces a torch batch norm and uses that norm's parameters and buffers. `tracks` is False while a block is
    recomputed, since the running statistics already include the block's input.
    """

    tracks = True

    @classmethod
    def of(cls, norm: BatchNorm, mesh: Mesh) -> SyncedBatchNorm:
        """Return the replacement of a torch batch norm, with the same parameters and buffers."""
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta")
        share_tensors(new, norm)
        new.mesh = mesh
        return new

    mesh: Mesh

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dims."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize in fp32; the result has the input's dtype."""
        x = input.float()
        shape = [1, -1, *[1] * (x.dim() - 2)]
        if self.training or self.running_mean is None or self.running_var is None:
            dims = [dim for dim in range(x.dim()) if dim != 1]
            count = x.numel() // x.shape[1] * self.mesh.data_size
            mean = self._summed(x.sum(dims)) / count
            centered = x - mean.view(shape)
            # The variance takes a second pass, since E[x^2] - E[x]^2 loses precision for a large mean.
            variance = self._summed((centered * centered).sum(dims)) / count
            if self.tracks and self.training:
                self._track(mean.detach(), variance.detach() * (count / max(count - 1, 1)))
        else:
            centered, variance = x - self.running_mean.view(shape), self.running_var
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        out = centered * scale.view(shape)
        return (out if self.bias is None else out + self.bias.view(shape)).to(input.dtype)

    def _summed(self, x: Tensor) -> Tensor:
        return x if self.mesh.data_size == 1 else _SumOverRanks.apply(x, self.mesh)  # type: ignore[return-value]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # Without momentum the average is cumulative, as in torch.
        share = 1.0 / self.num_batches_tracked.float() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)  # type: ignore[arg-type]
        self.running_var.lerp_(variance, share)  # type: ignore[arg-type]


def sync_batch_norms(part: nn.Module, mesh: Mesh) -> None:
    """Replace torch's batch norms in a part with SyncedBatchNorm, in place."""
    for name, module in list(part.named_modules()):
        if isinstance(module, BatchNorm) and not isinstance(module, SyncedBatchNorm):
            path, _, last = name.rpartition(".")
            setattr(part.get_submodule(path), last, SyncedBatchNorm.of(module, mesh))


def has_batch_norm(part: nn.Module) -> bool:
    """Return True if a part has a batch norm. The loss then depends on how many samples the micro-batches of all data
    ranks have together."""
    return any(isinstance(module, SyncedBatchNorm) for module in part.modules())


def tracking_once(block: nn.Module, forward: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return a function that creates a separate `forward` for each forward pass. The first call of that `forward`
    updates running statistics; the second call, which recomputes the block, does not."""
    norms = [module for module in block.modules() if isinstance(module, SyncedBatchNorm)]
    return (lambda: _Once(forward, norms)) if norms else (lambda: forward)


class _Once:
    """Forward method that updates running statistics only in its first call."""

    def __init__(self, forward: Callable[..., Any], norms: Sequence[SyncedBatchNorm]) -> None:
        self.forward, self.norms, self.first = forward, norms, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for norm in self.norms:
            norm.tracks = self.first
        self.first = False
        try:
            return self.forward(*args, **kwargs)
        finally:
            for norm in self.norms:
                norm.tracks = True
