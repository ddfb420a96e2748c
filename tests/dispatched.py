"""Counts of the kernels that torch launches."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Ops that compute nothing.
IDLE = ("empty", "detach", "_unsafe_view", "_reshape_alias", "alias")


class Dispatched(TorchDispatchMode):
    """While entered, counts dispatched ops by name, views and allocations left out."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not any(idle in name for idle in IDLE):
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))
