"""Names, signatures and storages of ops as a dispatch mode sees them."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

LOCAL_SCALAR: Any = torch.ops.aten._local_scalar_dense.default  # the op of Tensor.item
TO_COPY: Any = torch.ops.aten._to_copy.default
# Names of ops, as `op_name` returns them.
ALL_GATHER, REDUCE_SCATTER = "_allgather_base_", "_reduce_scatter_base_"
SCALED_MM = "_scaled_mm"
CPU_FLASH_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
CPU_FLASH_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
WITHOUT_COPY = ("_unsafe_view", "_reshape_alias")


def op_name(op: Any) -> str:
    """Return the name of an op without its namespace and overload, such as `mm`."""
    return op._opname


def op_schema(op: Any) -> Any:
    """Return an op's signature."""
    return op._schema


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage itself, which stays the same when its memory is resized."""
    return storage._cdata


def current_node() -> Any:
    """Return the graph node that autograd runs; None outside a backward pass."""
    return torch._C._current_autograd_node()


def real_tensors() -> Any:
    """Return a context manager in which ops run on real tensors, under none of the dispatch modes."""
    return _disable_current_modes()
