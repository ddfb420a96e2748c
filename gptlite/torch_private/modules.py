"""Parts of nn.Module: batch norms of any number of dims, parameters that are None, and buffers."""

from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the parameters and buffers of another one, those that are None included."""
    module._parameters, module._buffers = other._parameters, other._buffers


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return True if a checkpoint has this buffer of the module itself."""
    return buffer not in module._non_persistent_buffers_set
