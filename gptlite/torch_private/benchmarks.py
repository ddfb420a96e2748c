"""Private names of torch that only benchmarks use."""

from typing import Any

import torch


def fused_adamw_(*lists: Any, **settings: Any) -> None:
    """Run torch's fused AdamW on lists of tensors."""
    fused: Any = torch._fused_adamw_  # type: ignore[attr-defined]
    fused(*lists, **settings)


def busy_gpu(cycles: int) -> None:
    """Keep the current CUDA stream busy for that many clock cycles."""
    spin: Any = torch.cuda._sleep
    spin(cycles)
