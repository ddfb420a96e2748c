"""Parts of torch that the planner's simulation replaces or reads: process groups, attention, storages, schedules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input as stage_backward_input
from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from gptlite.torch_private.recording import real_tensors, storage_key


@contextmanager
def imagined_world(rank: int, world: int) -> Iterator[None]:
    """Context manager with a fake process group of `world` ranks, of which only `rank` exists. Messages are discarded.

    Raises RuntimeError if this process has already joined a group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process has already joined a process group; simulate ranks in a separate process")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def flash_attention_only() -> Iterator[None]:
    """Context manager that makes SDPA use the CPU's flash attention op. On the meta device, torch would otherwise
    materialise the attention scores."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def watched_resizes(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Context manager that calls `seen` after each resize of a storage. FSDP2 frees and reallocates memory by resizing
    storages."""
    resize: Any = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        seen(storage)
        return result

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def shapes_unseen() -> Iterator[None]:
    """Context manager that hides DTensor's shape propagation, which runs ops on fake tensors of the global shape, from
    dispatch modes."""
    cls, name = ShardingPropagator, "_propagate_tensor_meta_non_cached"
    find = getattr(cls, name)

    def unseen(*args: Any) -> Any:
        with real_tensors():
            return find(*args)

    setattr(cls, name, unseen)
    try:
        yield
    finally:
        setattr(cls, name, find)


@contextmanager
def held_messages() -> Iterator[None]:
    """Context manager that keeps the tensors of a pipeline schedule's messages alive for as long as the schedule keeps
    their work handles.

    The work handles of gloo and NCCL do this; those of the fake process group do not.
    """
    start: Any = schedules._batch_p2p

    def started(ops: list[dist.P2POp], *args: Any, **options: Any) -> list[Any]:
        return [*start(ops, *args, **options), _Held([op.tensor for op in ops])]

    schedules._batch_p2p = started  # type: ignore[assignment]
    try:
        yield
    finally:
        schedules._batch_p2p = start


class _Held:
    """Work handle that only keeps tensors alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        """Do nothing, as there is no communication."""


@contextmanager
def seen_reductions(seen: Callable[[str], None]) -> Iterator[None]:
    """Context manager that calls `seen` with the operator of each reduction (SUM, AVG, MAX, ...) before it is issued.
    The arguments that the dispatcher sees do not tell it."""
    names = [
        name
        for name in ("allreduce", "_reduce_scatter_base", "reduce_scatter_single")
        if name in vars(dist.ProcessGroup)
    ]
    before = {name: vars(dist.ProcessGroup)[name] for name in names}  # getattr would not give what binds the group
    operators = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")}

    def watched(call: Any) -> Any:
        def run(group: Any, *args: Any, **options: Any) -> Any:
            for given in (*args, *options.values()):
                if hasattr(given, "reduceOp"):
                    seen(next((name for name, op in operators.items() if given.reduceOp == op), "PREMUL_SUM"))
            return call(group, *args, **options)

        return run

    for name in names:
        setattr(dist.ProcessGroup, name, watched(getattr(dist.ProcessGroup, name)))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(dist.ProcessGroup, name, call)


def is_last_sum(tensor: Tensor) -> bool:
    """Return True if the addition being dispatched is autograd's sum of two gradients, and nothing else refers to the
    first of them, `tensor`.

    Autograd then adds in place, except for tensor subclasses such as fake tensors. The expected reference count is 4:
    one reference by autograd, two by the call and one by Python. For an addition in Python code it is 3.
    """
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    counted: Any = tensor  # _use_count is missing in the type stub
    return counted._use_count() == 4 and torch._C._storage_Use_Count(storage_key(tensor.untyped_storage())) == 2


def schedule_stages(schedule: Any) -> list[Any]:
    """Return this rank's stages in a pipeline schedule."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
