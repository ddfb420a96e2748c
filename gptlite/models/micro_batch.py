"""Size of a micro-batch on a rank, for memory estimates. No torch here."""

from dataclasses import dataclass

from gptlite.ops.config import Attention


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on a rank: its sequences and their length, element size in bytes, and the type of device.

    `tensor`: number of ranks that share each layer; `sequence`: True if they also shard the sequence between layers;
    `context`: number of ranks that share each sequence, of which `length` positions are on this one.
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
        """Number of keys per query for which scores are materialized, if they are."""
        # Rank r's chunks of length / 2 end after r + 1 and after 2 context - r of them; a query sees keys up to its
        # chunk's end, so this is the mean.
        return self.length * (self.context if self.context == 1 else self.context / 2 + 1 / 4)

    @property
    def tokens(self) -> int:
        """Number of positions in the micro-batch."""
        return self.sequences * self.length
