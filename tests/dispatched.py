"""What torch runs: ops as they are dispatched, and their number."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Ops that compute nothing.
IDLE = ("empty", "detach", "_unsafe_view", "_reshape_alias", "alias")


class Watching(TorchDispatchMode):
    """While entered, tells `see` of each op with its arguments and what it gave."""

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, args, out)
        return out


class Dispatched(Watching):
    """While entered, counts dispatched ops by name, views and allocations left out."""

    def __init__(self) -> None:
        super().__init__(self.count)
        self.ops: Counter[str] = Counter()

    def count(self, func: Any, args: Any, out: Any) -> None:
        name = func.overloadpacket.__name__
        if not func.is_view and not any(idle in name for idle in IDLE):
            self.ops[name] += 1
