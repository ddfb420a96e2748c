"""Limits of Dynamo, the part of torch.compile that records graphs."""

from contextlib import AbstractContextManager
from typing import Any


def a_graph_for_each_shape() -> AbstractContextManager[Any]:
    """Return a context manager in which a compiled function may have any number of graphs."""
    from torch._dynamo import utils

    return utils.disable_cache_limit()
