"""Settings of torch's allocator of GPU memory."""

from typing import Any

import torch


def set_allocator(settings: str) -> None:
    """Change settings of the allocator, written as in PYTORCH_ALLOC_CONF. This does not initialize CUDA."""
    core: Any = torch._C
    core._accelerator_setAllocatorSettings(settings)
