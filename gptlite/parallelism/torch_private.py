"""Private torch APIs that training depends on. docs/torch_versions.md lists them, and a test looks for each in the
installed version."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._profiler import RecordScope, _EventType
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

autograd: Any = _autograd  # its type stub is incomplete

# Renamed in torch 2.13, where the old names warn.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set a group's time limit for a collective."""
    # public since torch 2.14, where the private name warns
    set_group_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_group_timeout(timedelta(seconds=seconds), group)


def forget_meshes() -> None:
    """Clear DTensor's sharding propagation cache.

    A tensor on a new mesh would otherwise get an equal older mesh from the cache, whose process groups may be gone.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


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
        for group in _groups([module]):
            group._post_backward_pending = True  # only FSDP2's hooks set it, which a weight-gradient pass does not call
        module.finalize_backward()
        return
    root: Any = fully_shard.state(part)  # type: ignore[attr-defined]
    for group in _groups_of(root._state_ctx.all_states):
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
    for group in _groups_of(root._state_ctx.all_states):
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param"):  # exists after the first gather
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()


def keep_fp32_gradients(part: nn.Module) -> None:
    """Make FSDP2 keep reduced gradients in fp32, the `grad_dtype` of all parameters. Up to torch 2.14, it rounds those
    of bf16 parameters to bf16."""
    if isinstance(part, FSDPModule) and not finalizes(part):
        for group in _groups([part]):
            _reduce_into_fp32(group)


def _reduce_into_fp32(group: Any) -> None:
    resolve = group._init_mp_dtypes

    def resolved() -> None:
        resolve()
        group._orig_dtype = torch.float32  # the dtype to which reduced gradients are cast

    group._init_mp_dtypes = resolved  # called by FSDP2 before the first forward pass


def _groups(parts: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's parameter groups in parts of a model, including those of nested modules."""
    state_of: Any = fully_shard.state  # type: ignore[attr-defined]
    return _groups_of(state_of(each) for part in parts for each in part.modules() if isinstance(each, FSDPModule))


def _groups_of(states: Iterable[Any]) -> list[Any]:
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
    for group in _groups([part]):
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

    groups = _groups(parts)
    for group in groups:
        watch(group)
    try:
        yield
    finally:
        for group in groups:
            del group.wait_for_unshard, group.post_backward  # this restores the methods of the class


def _has_gradient(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


@contextmanager
def recorded_allocations() -> Iterator[list[tuple[int, int, int]]]:
    """Context manager that records this thread's CPU tensor allocations, in order. The yielded list is filled on exit.

    Entries are (nanoseconds since 1970, address, bytes), with negative bytes for frees. Frees of memory
    allocated before the recording are left out. The recorder is torch.profiler's, without operators. It costs about 10
    us per allocation, and must not be running already: see `profiler_runs`.
    """
    allocations: list[tuple[int, int, int]] = []
    settings: Any = torch.autograd.profiler.profile(use_cpu=True, use_kineto=True, profile_memory=True)
    older = torch.empty(1)
    with _silent_stderr():
        autograd._prepare_profiler(settings.config(), settings.kineto_activities)
        autograd._enable_profiler(settings.config(), settings.kineto_activities, {RecordScope.STATIC_RUNTIME_MODEL})
        del older  # the first free of unrecorded memory logs a warning, the next 999 do not
    try:
        yield allocations
    finally:
        with _silent_stderr():
            events: Any = autograd._disable_profiler().experimental_event_tree()
        begun: set[int] = set()
        for event in events:
            if event.tag != _EventType.Allocation:
                continue
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            # Skip frees of memory that was allocated before recording began, such as `older`.
            if size > 0 or address in begun:
                (begun.add if size > 0 else begun.remove)(address)
                allocations.append((event.start_time_ns, address, size))


def profiler_runs() -> bool:
    """Return True if torch.profiler is recording."""
    return autograd._profiler_enabled()


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Redirect the process's stderr to /dev/null, as torch 2.13's recorder logs its start and stop there."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class KeptForAll:
    """Backward context of selective checkpointing that can be entered twice, by the input- and the weight-gradient pass
    of a split backward pass.

    torch's own context consumes its cache, and raises "Trying to backward an extra time" the second time.
    """

    def __init__(self, context: Any) -> None:
        self._context, self._kept = context, context.storage

    def __enter__(self) -> Any:
        self._context.storage = {key: copy(entries) for key, entries in self._kept.items()}
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)


class OnlyKept(TorchDispatchMode):
    """Context of selective checkpointing that sees only the ops whose results it keeps.

    torch's own context counts every op, and raises an error if the recomputation runs different ops than the forward
    pass. This happens if FSDP2 gathers parameters inside a block.
    """

    def __init__(self, context: Any, keeps: Callable[[object], bool]) -> None:
        super().__init__()
        self._context, self._keeps = context, keeps

    @property
    def storage(self) -> Any:
        """The kept results."""
        return self._context.storage

    @storage.setter
    def storage(self, value: Any) -> None:
        self._context.storage = value

    def __enter__(self) -> Any:
        if hasattr(self._context, "func_counter"):  # not in torch 2.11
            self._context.func_counter.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._keeps(func):
            return self._context.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor has data: it is neither on the meta device nor a fake tensor."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def compile_block(block: nn.Module, **options: Any) -> None:
    """Compile a block's forward method in place, with Python floats as constants.

    By default, Dynamo turns a float that has changed since an earlier compilation in the process, such as a dropout
    probability, into a symbol. It fails on symbols in an autograd.Function.
    """
    from torch._dynamo import config  # here, since the import takes a second

    config.specialize_float = True
    block.compile(**options)
