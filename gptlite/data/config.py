"""What is read, and in what batches."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Packing(Enum):
    """How documents share a sequence. Both read the same tokens, document after document.

    `concatenate`: a sequence is one text, whatever it holds. `documents`: each document in it is read as if it were
    alone: attention does not look into another, positions begin anew, and no token is predicted from another's end.
    """

    concatenate = "concatenate"
    documents = "documents"


@dataclass
class DataConfig:
    """Batch shape, the same for every corpus. Sizes are in sequences of `sequence_length` tokens."""

    global_batch_size: int = 16
    micro_batch_size: int | None = None  # null: the largest up to 16 that the layout can run
    sequence_length: int = 256
    batch_ramp: list[int] | None = None  # [first size, increment, samples]: the global batch grows meanwhile
    packing: Packing = Packing.concatenate
    cache_dir: str = "~/.cache/gptlite"

    @property
    def documents(self) -> bool:
        """Whether documents that share a sequence are kept apart."""
        return self.packing is Packing.documents


@dataclass
class TextConfig(DataConfig):
    """Any text file, or folder of *.txt files, tokenized on first use into `cache_dir`.

    `tokenizer` is sentencepiece (trained on the text), char or byte. `vocab_size` is for sentencepiece.
    `validation_fraction` of the text is held out, taken from the end of every document.
    """

    path: str = "???"
    tokenizer: str = "sentencepiece"
    vocab_size: int = 4096
    validation_fraction: float = 0.1


@dataclass
class CorpusConfig(DataConfig):
    """A corpus with a recipe in data/<corpus>/prepare.py, run on first use into `cache_dir`.

    `arguments` are the recipe's own, such as `{max_documents: 1000}`; a null one is left out.
    """

    corpus: str = "???"
    tokenizer: str = "sentencepiece"
    vocab_size: int = 4096
    path: str | None = None  # the raw source, where it cannot be downloaded
    arguments: dict[str, str | None] = field(default_factory=dict)


@dataclass
class TokensConfig(DataConfig):
    """Prepared folders, as gptlite preprocess writes them: tokenizer/, train.* and val.*.

    `path` is one folder. `blend` maps folders to weights, which need not sum to one, and is read instead of it; all
    must have the same tokenizer.
    """

    path: str | None = None
    blend: Any = None  # dict[str, float]: as a typed one, Hydra would not take new keys on the command line


@dataclass
class SyntheticConfig(DataConfig):
    """Random tokens from a fixed seed, for measuring speed: nothing to download, nothing to learn."""

    vocab_size: int = 50257
    num_tokens: int = 10_000_000
