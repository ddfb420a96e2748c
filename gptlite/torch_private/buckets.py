"""FSDP2: the parameters of a bucket, and the layout of its flat gradients."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from gptlite.torch_private.fsdp import groups_of_states


def _group(module: FSDPModule) -> Any:
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    return next(iter(groups_of_states([state])), None)


def bucket_of(module: FSDPModule) -> object | None:
    """Return an object that is the same for all modules whose gradients FSDP2 reduces together; None if it reduces none
    for this module, since nested modules have all parameters."""
    return _group(module)


def sharded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of a module's bucket, in the order of the flat gradients."""
    return [param.sharded_param for param in _group(module).fsdp_params if param.sharded_param.requires_grad]


def registered_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return what the modules have in the places of `sharded_parameters`. Before the first forward pass, these are the
    parameters that `nn.Module.to_empty` has created; in a step, FSDP2 has gathered ones there."""
    places = [param._module_info for param in _group(module).fsdp_params if param.sharded_param.requires_grad]
    return [getattr(place.module, place.param_name) for place in places]


def padded_shard_sizes(module: FSDPModule) -> list[int]:
    """Return the number of elements that each parameter of a bucket has in a row of the flat gradients."""
    params = [param for param in _group(module).fsdp_params if param.sharded_param.requires_grad]
    return [param.padded_sharded_param_size.numel() for param in params]


def padded_gathered_sizes(module: FSDPModule) -> list[int]:
    """Return the number of elements that each parameter of a bucket, trained or not, has in a rank's gathered part."""
    return [param.padded_sharded_param_size.numel() for param in _group(module).fsdp_params]


def frees_after_forward(module: FSDPModule) -> bool:
    """Return True if a module's parameters are freed after the forward pass and gathered again in the backward pass."""
    return _group(module)._reshard_after_forward


def in_backward(module: FSDPModule) -> bool:
    """Return True while parameters are gathered for a backward pass, ahead of it too."""
    return _group(module)._training_state is TrainingState.PRE_BACKWARD


def all_reduces(module: FSDPModule) -> bool:
    """Return True in the backward pass after which gradients are summed over replicas, the last of a step."""
    return _group(module).all_reduce_grads
