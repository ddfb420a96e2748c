"""What a rank computes at a time, for estimates of memory. No torch here."""

from dataclasses import dataclass

from gptlite.ops.config import Attention


@dataclass(frozen=True)
class MicroBatch:
    """What a rank computes at a time: sequences of that length, in elements of `itemsize` bytes, on a kind of device.

    `tensor`: ranks that share each layer; `sequence`: whether they cut the sequence between layers too; `context`:
    ranks that share each sequence, of which `length` positions are here.
    """

    sequences: int
    length: int
    itemsize: int
    device: str
    attention: Attention
    tensor: int = 1
    sequence: bool = False
    context: int = 1

    @property
    def keys(self) -> float:
        """Positions that the scores of a query are written out for, where they are."""
        return self.length * (self.context if self.context == 1 else self.context / 2 + 1 / 4)

    @property
    def tokens(self) -> int:
        """Positions in it."""
        return self.sequences * self.length
