"""Modes that see each op which torch's dispatcher runs, contexts of selective activation checkpointing, the profiler's
state, and tensors without data."""

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from torch._C._autograd import _profiler_enabled as profiler_runs  # whether torch.profiler is recording
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ("TorchDispatchMode", "profiler_runs")


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor has data: it is neither on the meta device nor a fake tensor."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


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
