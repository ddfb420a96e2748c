"""Weights of a given module: copy of the module on the meta device, and distribution of the weights over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gptlite.errors import ConfigError
from gptlite.models.model import Model
from gptlite.parallelism.boxes import local_box, local_tensor
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all
from gptlite.satellites.engine.module import ModuleSpec


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of the module in training mode, whose parameters and buffers are on the meta device."""
    memo: dict[int, Tensor] = {id(buffer): buffer.detach().to("meta") for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo).train()  # type: ignore[arg-type]


def check_module(module: nn.Module, mesh: Mesh) -> None:
    """Raise ConfigError, on all ranks, if ranks have different modules, or if rank 0's module has tensors without
    values. Collective."""

    def described() -> list[tuple[str, tuple[int, ...], str]]:
        for name, tensor in _values(module):
            if is_lazy(tensor) or (tensor.is_meta and mesh.is_main):
                raise ConfigError(f"model: {name} has no values (a lazy or meta tensor); initialize it on rank 0 first")
        return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _values(module)]

    found = from_all(mesh, described)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            raise ConfigError(
                f"model: the parameters or buffers of rank {rank}'s module differ from rank 0's in name, shape or "
                "dtype; build the same module on all ranks"
            )


def refuse_ties(spec: ModuleSpec, config: Any, layout: ParallelismConfig, mesh: Mesh) -> None:
    """Raise ConfigError if the layout would separate parameters that the module holds under several names."""
    assert spec.module is not None
    units = {id(block) for block in spec.blocks(spec.module).values()}
    prefixes = [f"{name}." for name, module in spec.module.named_modules() if id(module) in units]

    def unit(name: str) -> str:
        return next((prefix for prefix in prefixes if name.startswith(prefix)), "")

    for other, first in spec.tied(config).items():
        problem = f"the module holds one parameter under two names, {first} and {other}"
        if layout.pipeline > 1:
            raise ConfigError(f"parallelism.pipeline={layout.pipeline}: {problem}; use parallelism.pipeline=1")
        if unit(first) != unit(other) and (mesh.fsdp_size > 1 or layout.offload is not Offload.none):
            raise ConfigError(
                f"parallelism: {problem}, which are not in the same block and so are gathered separately; move both "
                "into one block, or both out of the blocks, or train on one rank without offload"
            )


@torch.no_grad()
def fill_from(module: nn.Module, model: Model, parts: Sequence[nn.Module], mesh: Mesh) -> None:
    """Set the parameters and buffers of this rank's parts to the values of rank 0's module, one tensor at a time."""
    held: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in [*model.named_weights(part), *part.named_buffers(remove_duplicate=False)]:
            held.setdefault(name, []).append(tensor)
    for name, tensor in _values(module):
        if mesh.is_main:
            value = tensor.detach().to(mesh.device).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
        if mesh.world_size > 1 and value.numel():
            dist.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes, since gloo does not support every dtype
        for target in held.get(name, ()):
            shape, offset = local_box(target)
            box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            local_tensor(target).detach().copy_(value[box])


def _values(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and values of all parameters and buffers. A parameter appears once, under its first name; a
    buffer appears under all of its names."""
    return [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]
