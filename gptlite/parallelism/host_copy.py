"""Asynchronous copies between host and device."""

import torch
from torch import Tensor


class HostCopy:
    """Asynchronous copy of a tensor's current values to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            # a copy to unpinned memory would block
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor.detach().clone()  # the tensor may change before its values are read

    @property
    def arrived(self) -> bool:
        """True if `wait` would not block."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`. For a GPU, copy asynchronously from pinned memory, in stream order."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
