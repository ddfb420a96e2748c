"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) on FSDP2, whose flags select the stage.

| stage | parameters                         | gradients while accumulating               | optimizer state |
|-------|------------------------------------|--------------------------------------------|-----------------|
| 0     | replicated                         | full, all-reduced at the end of the step   | replicated      |
| 1     | gathered during the step           | full, reduce-scattered at the end          | sharded         |
| 2     | gathered during the step           | reduce-scattered after every micro-batch   | sharded         |
| 3     | gathered by block, freed after use | reduce-scattered after every micro-batch   | sharded         |

Stage 0 is FSDP2's hybrid sharding with a shard axis of size 1. With dp_replicate above 1, the shards of stages 1 to 3
are replicated (HSDP), and their gradients are all-reduced at the end of the step.

FSDP2 refuses parameters without dims, such as a logit scale. They are replicated in every stage, and `sum_scalars`
all-reduces their gradients at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from gptlite.parallelism.axes import DATA_AXES, EXPERT_DATA_AXES
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.point_to_point import PairwiseAllGather, PairwiseReduceScatter


def shard(
    part: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    config: ParallelismConfig,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Shard a model part over the data axes, in place.

    With one data rank, the part is left unchanged, unless model state is offloaded: then the rank holds the only shard,
    and FSDP2 keeps that shard and its gradient in host memory, as with several shards.

    `blocks` are gathered and reduced `bucket_layers` at a time, and the rest of the part together. Parameters are
    gathered in `dtype`, gradients reduced in `reduce_dtype`. `experts` are modules inside blocks whose parameters are
    sharded over the expert axis. They are gathered and reduced separately, over the data axes of the experts' mesh.
    """
    offloads = config.offload is not Offload.none
    if mesh.fsdp_size == 1 and not offloads:  # FSDP2 would keep a second copy of the parameters even on one rank
        return
    reduction = mesh.reduction  # FSDP2's own all-reduce over `dp_replicate` cannot be replaced, only left out
    hybrid = reduction is None and mesh.fsdp_size > 1 and (config.zero == 0 or mesh.size("dp_replicate") > 1)
    axes = DATA_AXES if hybrid else ("dp_shard",)  # with a mesh of two axes FSDP2 replicates over the first
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    pins = mesh.device.type == "cuda" and not config.offload_parameters  # the memory of mapped files cannot be pinned
    place = CPUOffloadPolicy(pin_memory=pins) if offloads else OffloadPolicy()
    scalars = {parameter for parameter in part.parameters() if parameter.ndim == 0}
    split = partial(fully_shard, mp_policy=policy, offload_policy=place, ignored_params=scalars)
    if mesh.expert_mesh is not None:
        data = mesh.expert_mesh[EXPERT_DATA_AXES if hybrid else EXPERT_DATA_AXES[1:]]
        for module in experts:
            split(module, mesh=data, reshard_after_forward=config.zero == 3)
    split = partial(split, mesh=mesh.along(*axes))
    size = config.bucket_layers
    buckets = [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]
    for bucket in buckets:
        # before the call for the whole part, which shards all parameters that are left
        split(bucket, reshard_after_forward=config.zero == 3)
    split(part, reshard_after_forward=False)  # the backward pass begins with these, so freeing them would save nothing
    for module in sharded_modules(part):
        # Gradients are sums over the tokens of the global batch: nothing is averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the default, PREMUL_SUM, is not supported by gloo
        among = mesh.layout.expert_sizes[2] if module in experts else mesh.size("dp_shard")
        if mesh.device.type == "cpu" and among > 1:  # gloo's own collectives are slower
            module.set_custom_all_gather(PairwiseAllGather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(PairwiseReduceScatter())  # type: ignore[arg-type]
        if reduction is not None:
            reduction.attach(module)
    if config.zero == 3 and config.prefetch > 1:
        _prefetch([bucket[0] for bucket in buckets], config.prefetch)  # the modules of a bucket share one FSDP2 state


@torch.no_grad()
def sum_scalars(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sum the gradients of the parameters without dims over the data ranks. A rank without a gradient counts as 0."""
    scalars = [parameter for parameter in parameters if parameter.ndim == 0 and parameter.requires_grad]
    if mesh.fsdp_size == 1 or not scalars:
        return
    for parameter in scalars:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    gradients = [parameter.grad for parameter in scalars if parameter.grad is not None]
    # An offloaded gradient is on the host.
    summed = all_reduce(torch.stack(gradients).to(mesh.device, torch.float32), mesh, DATA_AXES)
    for gradient, total in zip(gradients, summed.unbind(), strict=True):
        gradient.copy_(total)


def sharded_modules(part: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 gathers. The list is empty if `shard` left the part unchanged."""
    return [module for module in part.modules() if isinstance(module, FSDPModule)]


def storage_device(mesh: Mesh, config: ParallelismConfig) -> torch.device:
    """Return the device that stores parameters, gradients and optimizer state between uses."""
    return mesh.device if config.offload is Offload.none else torch.device("cpu")


def before_backward(part: nn.Module, zero: int, last: bool) -> None:
    """Set FSDP2's flags for the next backward pass, according to the table above.

    `last` marks the step's last backward pass of this part.
    """
    if not isinstance(part, FSDPModule):
        return
    part.set_is_last_backward(last)
    part.set_requires_gradient_sync(last or zero >= 2)
    part.set_requires_all_reduce(last)  # replicas are all-reduced once per step, after the last reduce-scatter
    part.set_reshard_after_backward(last or zero == 3)


def gather(part: nn.Module) -> None:
    """Gather all parameters of a part."""
    for module in sharded_modules(part):
        module.unshard()


def reshard(parts: Iterable[nn.Module]) -> None:
    """Free gathered parameters, for example after an evaluation, which does not free them."""
    for part in parts:
        for module in sharded_modules(part):
            module.reshard()


def _prefetch(modules: list[nn.Module], ahead: int) -> None:
    """Set FSDP2 to prefetch `ahead` buckets. By default it prefetches one, in the backward pass."""
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + ahead])  # type: ignore[arg-type]
        module.set_modules_to_backward_prefetch(modules[max(0, index - ahead) : index][::-1])  # type: ignore[arg-type]
