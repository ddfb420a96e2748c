"""FSDP2: gradients of split backward passes, their dtype, its buffers and its transfers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def finalizes(part: FSDPModule) -> bool:
    """Return True if FSDP2 reduces gradients on request, with `FSDPModule.finalize_backward`: since torch 2.15."""
    return hasattr(part, "finalize_backward")


def split_backward(part: FSDPModule) -> None:
    """Prepare a part for backward passes that are split into an input-gradient and a weight-gradient pass. Called
    before the forward pass, as FSDP2 has no hook after the weight-gradient pass: see `reduce_gradients_now`."""
    if finalizes(part):
        cast(Any, part).set_manual_backward_finalization(True)


def reduce_gradients_now(part: FSDPModule) -> None:
    """Reduce the available gradients, as at the end of a backward pass.

    From torch 2.15 on, replicas (HSDP) are all-reduced as well, since FSDP2 does not finalize partial sums. Before, the
    calls are the same as in torch's PipelineStage.perform_reduce_grad.
    """
    module: Any = part
    if finalizes(part):
        part.set_requires_all_reduce(True)
        for group in groups_of([module]):
            group._post_backward_pending = True  # only FSDP2's hooks set it, which a weight-gradient pass does not call
        module.finalize_backward()
        return
    root: Any = fully_shard.state(part)  # type: ignore[attr-defined]
    for group in groups_of_states(root._state_ctx.all_states):
        group.post_backward()
    root._root_post_backward_final_callback()


def accumulate_gradients_now(part: FSDPModule) -> None:
    """Add the available gradients to those of earlier micro-batches, in the reduction's dtype.

    FSDP2's hooks do this, except in the weight-gradient pass of a split backward pass, whose gradients would otherwise
    be accumulated in 16-bit precision. From torch 2.15 on, parameters have a gradient dtype, and autograd does it.
    """
    if finalizes(part):
        return
    root: Any = fully_shard.state(part)  # type: ignore[attr-defined]
    for group in groups_of_states(root._state_ctx.all_states):
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param"):  # exists after the first gather
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()


def keep_fp32_gradients(part: nn.Module) -> None:
    """Make FSDP2 keep reduced gradients in fp32, the `grad_dtype` of all parameters. Up to torch 2.14, it rounds those
    of bf16 parameters to bf16."""
    if isinstance(part, FSDPModule) and not finalizes(part):
        for group in groups_of([part]):
            _reduce_into_fp32(group)


def _reduce_into_fp32(group: Any) -> None:
    resolve = group._init_mp_dtypes

    def resolved() -> None:
        resolve()
        group._orig_dtype = torch.float32  # the dtype to which reduced gradients are cast

    group._init_mp_dtypes = resolved  # called by FSDP2 before the first forward pass


def groups_of(parts: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's parameter groups in parts of a model, including those of nested modules."""
    state_of: Any = fully_shard.state  # type: ignore[attr-defined]
    return groups_of_states(state_of(each) for part in parts for each in part.modules() if isinstance(each, FSDPModule))


def groups_of_states(states: Iterable[Any]) -> list[Any]:
    """Return the parameter groups of FSDP2's states, each once, as modules wrapped together share a state."""
    groups: dict[int, Any] = {}
    for state in states:
        some = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # 2.11
        groups |= {id(group): group for group in some if group is not None}
    return list(groups.values())


def fsdp_buffers(part: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers that FSDP2 holds for a part in addition to shards and their gradients: gathered parameters,
    and gradients that are not fully reduced.

    Parameters freed between the forward and backward pass are left out, as they exist for one block at a time.
    """
    gathered: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for group in groups_of([part]):
        gradients.append(group._partial_reduce_output)
        for param in group.fsdp_params:
            gathered += [] if group._reshard_after_forward else param.all_gather_outputs
            whole = getattr(param, "_unsharded_param", None)  # exists after the first gather
            gradients += [param.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return gathered, [gradient for gradient in gradients if gradient is not None]


@contextmanager
def watched_shards(
    parts: Iterable[nn.Module], gathered: Callable[[int], None], reduced: Callable[[int], None]
) -> Iterator[None]:
    """Context manager that reports the host-device transfers of an offloaded model.

    It calls `gathered(bytes)` with the size of this rank's parameter shards whenever FSDP2 gathers a parameter group,
    and `reduced(bytes)` with the size of this rank's fp32 gradient shards before a group's gradients are reduced. With
    HSDP, `reduced` is called only if the gradients are also all-reduced.
    """

    def watch(group: Any) -> None:
        wait, post_backward = group.wait_for_unshard, group.post_backward

        def waited() -> None:
            if group._all_gather_result is not None:
                gathered(sum(param._sharded_param_data.nbytes for param in group.fsdp_params))
            wait()

        def reduces() -> None:
            copies = group.mesh_info.mesh.ndim > 1
            found = [param for param in group.fsdp_params if _has_gradient(param)]
            # With copies (HSDP), the sum over all ranks is complete only after the all-reduce.
            if found and group.reduce_grads and (group.all_reduce_grads or not copies):
                reduced(sum(4 * param._sharded_param_data.numel() for param in found))
            post_backward()

        group.wait_for_unshard, group.post_backward = waited, reduces

    groups, names = groups_of(parts), ("wait_for_unshard", "post_backward")
    before = [{name: vars(group)[name] for name in names if name in vars(group)} for group in groups]
    for group in groups:
        watch(group)
    try:
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            del group.wait_for_unshard, group.post_backward  # this restores the methods of the class
            vars(group).update(own)


def _has_gradient(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
