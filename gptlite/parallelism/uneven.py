"""Equal gradients on tensor-parallel ranks whose shards of other parameters are unequal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.tensor import TensorAxis, is_cut


def equalize_gradients(parameters: Sequence[Tensor], axis: TensorAxis, mesh: Mesh) -> None:
    """Copy the gradients of unsharded parameters from the axis's first rank if shards are unequal, as of an uneven
    vocabulary.

    Each rank has computed the same gradients. But an all-reduce over three or more data ranks adds elements in an order
    that depends on their position, which is behind the shards of other parameters in the same bucket. With sequence
    parallelism they are equal already: slices of them have been added.
    """
    if axis.sequence or mesh.size("dp_replicate") < 3:
        return
    if not any(is_cut(parameter) and parameter.shape[0] % axis.size for parameter in parameters):
        return
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None and not is_cut(p)]
    if gradients:
        whole = torch.cat([gradient.flatten() for gradient in gradients]).to(axis.mesh.device_type)
        dist.broadcast(whole, group=axis.group, group_src=0)
        for gradient, first in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(first.view_as(gradient))
