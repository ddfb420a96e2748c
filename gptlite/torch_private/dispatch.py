"""Modes that see each op which torch's dispatcher runs, and tensors without data."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor has data: it is neither on the meta device nor a fake tensor."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)
