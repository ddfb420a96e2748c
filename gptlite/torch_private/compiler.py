"""Settings of torch.compile. Each import here takes a second, so it is made when the setting is used."""

from typing import Any

from torch import nn


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
