"""KV cache for text generation, so that keys and values of each token are computed only once."""

from torch import Tensor


class LayerCache:
    """Keys and values of one layer, [B, H, capacity, D], filled from the left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [B, H, S, D], and return all keys and values so far. Raises ValueError beyond the capacity."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a KV cache of {self.capacity}")
        if self.keys is None or self.values is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]
