"""FSDP2's parameter groups: layout, state, and shards that their owner keeps elsewhere between uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from gptlite.torch_private.fsdp import groups_of, groups_of_states


@dataclass(frozen=True)
class Hooks:
    """Functions that a group calls, the first two with True in a backward pass.

    `load` is called before FSDP2 reads the shards, `loaded` after it has copied them, and `reduced` with the gradients
    of a backward pass, one or None per parameter.
    """

    load: Callable[[bool], None]
    loaded: Callable[[bool], None]
    reduced: Callable[[list[Tensor | None]], None]


class Group:
    """Parameters that FSDP2 gathers and reduces together. Two objects for the same parameters are equal.

    `sizes` are the elements of the parameters' shards, padded to those of the longest shard.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._params = group, list(group.fsdp_params)
        self.sizes = [param.padded_sharded_param_size.numel() for param in self._params]
        self._kept: list[Tensor] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._group is other._group

    def __hash__(self) -> int:
        return hash(self._group)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [param.sharded_param for param in self._params]

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those that are trained, in the order of the flat gradients."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @property
    def trained_sizes(self) -> list[int]:
        """The number of elements that each trained parameter has in a row of the flat gradients."""
        pairs = zip(self.parameters, self.sizes, strict=True)
        return [size for parameter, size in pairs if parameter.requires_grad]

    @property
    def registered(self) -> list[nn.Parameter]:
        """Parameters that the modules have in the places of `trained`. Before the first forward pass, these are those
        that `nn.Module.to_empty` has created; in a step, FSDP2 has gathered ones there."""
        places = [param._module_info for param in self._params if param.sharded_param.requires_grad]
        return [getattr(place.module, place.param_name) for place in places]

    @property
    def frees(self) -> bool:
        """True if parameters are freed after the forward pass and gathered again for the backward pass."""
        return bool(self._group._reshard_after_forward)

    @property
    def in_backward(self) -> bool:
        """True while parameters are gathered for a backward pass, ahead of it too."""
        return self._group._training_state.name == "PRE_BACKWARD"

    @property
    def last(self) -> bool:
        """True in a step's last micro-batch."""
        return bool(self._group.all_reduce_grads)

    @torch.no_grad()
    def place(self, shards: Sequence[Tensor]) -> None:
        """Replace the parameters by ones whose memory is `shards`, flat tensors of the lengths `sizes`.

        Call it before the parameters are materialized.
        """
        self._kept = list(shards)
        for param, shard in zip(self._params, shards, strict=True):
            dim = param.fsdp_placement.dim
            padded = shard.view(param.padded_sharded_param_size)
            length = param.sharded_size[dim] if param.sharded_size.numel() else 0
            local = param.to_sharded_dtensor(padded.narrow(dim, 0, length))
            param.sharded_param = nn.Parameter(local, requires_grad=param.sharded_param.requires_grad)
            param._sharded_param_data = shard  # of the same storage, so FSDP2 does not pad the shard once more
            param._setattr_on_modules(param.sharded_param)

    def feed(self, shards: Sequence[Tensor] | None) -> None:
        """Let FSDP2 read the parameters from these flat tensors; None: from those of `place`."""
        for param, shard in zip(self._params, self._kept if shards is None else shards, strict=True):
            param._sharded_param_data = shard

    def hook(self, hooks: Hooks) -> None:
        """Call `hooks` from now on."""
        group = self._group
        unshard, wait, post_backward = group.unshard, group.wait_for_unshard, group.post_backward
        # With one shard, FSDP2 does not read it to start a gather, but when it waits for it.
        alone = getattr(group.mesh_info, "shard_mesh_size", 1) == 1 and hasattr(group, "_all_gather_output")

        def fed(read: Callable[[], None]) -> None:
            backward = self.in_backward
            hooks.load(backward)
            read()
            hooks.loaded(backward)

        def unsharding(async_op: bool = False) -> None:
            if alone or group._all_gather_result is not None or group.is_unsharded:
                unshard(async_op)
            else:
                fed(lambda: unshard(async_op))

        def waiting() -> None:
            if alone and group._all_gather_result is not None:
                fed(wait)
            else:
                wait()

        def reducing(*unused: Any) -> None:
            for parameter in self.parameters:
                parameter.grad = None  # FSDP2 would add to it
            post_backward()
            gradients = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            hooks.reduced(gradients)

        group.unshard, group.wait_for_unshard, group.post_backward = unsharding, waiting, reducing

    def reduce_every_pass(self) -> None:
        """Reduce gradients after every backward pass, although `set_requires_gradient_sync` of FSDP2's modules may ask
        to keep them whole until a later one."""
        group, post_backward = self._group, self._group.post_backward

        def reducing(*unused: Any) -> None:
            group.reduce_grads = True
            post_backward()

        group.post_backward = reducing


def group_of(module: FSDPModule) -> Group | None:
    """Return the parameter group of a module, which it may share; None if nested modules have all parameters."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    return next(map(Group, groups_of_states([state])), None)


def groups(part: nn.Module) -> list[Group]:
    """Return FSDP2's parameter groups in a part, that of the part itself first."""
    return [Group(each) for each in groups_of([part]) if each.fsdp_params]
