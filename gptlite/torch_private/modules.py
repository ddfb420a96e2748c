"""Parts of nn.Module: batch norms of any number of dims, parameters that are None, buffers, and settings of its
compilation. Each import of the compiler takes a second, so it is made when the setting is used."""

from typing import Any

import torch
from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the parameters and buffers of another one, those that are None included."""
    module._parameters, module._buffers = other._parameters, other._buffers


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return True if a checkpoint has this buffer of the module itself."""
    return buffer not in module._non_persistent_buffers_set


def leave_meta(module: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory for parameters and buffers on the meta device, as `nn.Module.to_empty` does."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def compile_block(block: nn.Module, **options: Any) -> None:
    """Compile a block's forward method in place, with Python floats as constants.

    By default, Dynamo turns a float that has changed since an earlier compilation in the process, such as a dropout
    probability, into a symbol. It fails on symbols in an autograd.Function.
    """
    from torch._dynamo import config

    config.specialize_float = True
    block.compile(**options)


def inductor_has(option: str) -> bool:
    """Return True if inductor has an option of this name."""
    from torch._inductor import config

    return option in config.get_config_copy()
