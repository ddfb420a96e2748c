"""Copies between host and device that neither waits for."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor's values on their way to the host, as they are when this is made."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor.detach().clone()

    @property
    def arrived(self) -> bool:
        """Whether `tolist` would not wait."""
        return self._event is None or self._event.query()

    def tolist(self) -> list:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. A GPU fetches it from page-locked memory, in the order of its stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
