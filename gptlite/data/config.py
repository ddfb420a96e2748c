"""Data configuration: the source of the tokens, and the shape of the batches."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Packing(Enum):
    """Treatment of documents that share a sequence. Both modes read the same tokens, document after document.

    `concatenate` treats a sequence as one text. `documents` isolates the documents in a sequence: attention stays
    within a document, positions restart at its beginning, and the first token of a document is not predicted.
    """

    concatenate = "concatenate"
    documents = "documents"


@dataclass
class DataConfig:
    """Settings common to all data sources. Batch sizes are in sequences of `sequence_length` tokens."""

    global_batch_size: int = 16
    micro_batch_size: int | None = None  # null: the largest size up to 16 that the layout can run
    sequence_length: int = 256
    batch_ramp: list[int] | None = None  # [first size, increment, samples]: ramp-up of the global batch size
    ramp_factor: float = 1.0  # with batch_ramp=[first size, increment]: grow below noise scale / factor (adascale.md)
    ramp_steps: int = 100  # with batch_ramp=[first size, increment]: steps between two decisions to grow
    packing: Packing = Packing.concatenate
    cache_dir: str = "~/.cache/gptlite"

    @property
    def unit(self) -> str:
        """Unit of losses and throughput."""
        return "tokens"

    @property
    def handed_over(self) -> bool:
        """True if the calling program supplies the batches, which may have any size (gptlite.initialize)."""
        return False

    @property
    def documents(self) -> bool:
        """True if documents that share a sequence are isolated from each other."""
        return self.packing is Packing.documents


@dataclass
class TokensConfig(DataConfig):
    """Prepared folders, as written by gptlite preprocess: tokenizer/, train.* and val.*.

    `path` is one folder. `blend` maps folders to weights, which need not sum to one, and replaces `path`. All
    folders must have the same tokenizer.
    """

    path: str | None = None
    blend: Any = None  # dict[str, float]; with that annotation, Hydra would reject new keys on the command line


@dataclass
class DatasetConfig(DataConfig):
    """Base class for the settings of registered datasets (gptlite.data.registry). Batch sizes are in samples.

    `workers` is the number of processes that prefetch samples; 0: the training process reads them between steps.
    """

    sequence_length: int = 1  # a sample counts as one position
    workers: int = 0

    @property
    def unit(self) -> str:
        """Unit of losses and throughput."""
        return "samples"


@dataclass
class SyntheticConfig(DataConfig):
    """Random tokens drawn with the run's seed, for benchmarks. Nothing is downloaded, and there is nothing to learn."""

    vocab_size: int = 50257
    num_tokens: int = 10_000_000
