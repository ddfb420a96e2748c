"""How the model is cut over devices, and what is recomputed in the backward pass."""

from dataclasses import dataclass
from enum import Enum


class ActivationCheckpointing(Enum):
    """What the backward pass recomputes: nothing, whole blocks, or all but the matmuls and attention."""

    none = "none"
    full = "full"
    selective = "selective"


@dataclass
class ParallelismConfig:
    """Degrees of each mesh axis. `data: null` is what is left of the world."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int | None = None
    dp_replicate: int = 1
    zero: int = 0
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
