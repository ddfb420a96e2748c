"""A block to tokens: what a worker does."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gptlite.data.tokenizer import Tokenizer, load_tokenizer
from gptlite.preprocess.blocks import DIGEST, Block, Cutting
from gptlite.preprocess.documents import Bad, documents


@dataclass
class Split:
    """Whole documents: tokens one after the other, each document ended by `eod`; tokens and bytes of text of each."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: int


@dataclass
class Encoded:
    """A block in tokens. `part` is of the long document that the block is a part of, without `eod`."""

    train: Split
    held_out: Split
    bad: list[Bad] = field(default_factory=list)
    empty: int = 0
    part: Split | None = None


class Encoder:
    """Tokenizes blocks. A document is held out by a hash of its text, so neither order nor workers matter."""

    def __init__(self, tokenizer: Tokenizer, formats: list[str], cutting: Cutting, validation_fraction: float):
        self._tokenizer, self._formats, self._cutting = tokenizer, formats, cutting
        self._fraction = validation_fraction
        small = tokenizer.vocab_size < 1 << 16
        self._dtype = np.dtype(np.uint16 if small else np.int32)
        self._eod = np.array([tokenizer.eod], dtype=np.int32)

    @classmethod
    def load(cls, folder: Path, formats: list[str], cutting: Cutting, validation_fraction: float) -> "Encoder":
        """With the tokenizer that was saved in `folder`."""
        return cls(load_tokenizer(folder), formats, cutting, validation_fraction)

    def encode(self, block: Block) -> Encoded:
        """All documents of a block, without the empty ones."""
        parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        text_bytes, empty = [0, 0], 0
        bad: list[Bad] = []
        long: Split | None = None
        for piece, document in documents(block, self._formats, self._cutting):
            if isinstance(document, Bad):
                bad.append(document)
                continue
            if piece is block.part:
                ids = self._tokenizer.encode_array(document.text)
                long = Split(ids.astype(self._dtype), np.array([ids.size]), len(document.data))
                continue
            if not document.data:
                empty += 1
                continue
            digest = piece.digest or hashlib.blake2b(document.data, digest_size=DIGEST).digest()
            split = is_held_out(digest, self._fraction)
            parts[split].extend((self._tokenizer.encode_array(document.text), self._eod))
            text_bytes[split] += len(document.data)
        train, held_out = (self._joined(parts[n], text_bytes[n]) for n in (0, 1))
        return Encoded(train, held_out, bad, empty, long)

    def _joined(self, parts: list[np.ndarray], text_bytes: int) -> Split:
        lengths = np.array([ids.size + 1 for ids in parts[::2]], dtype=np.int32)
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        return Split(tokens.astype(self._dtype), lengths, text_bytes)


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether the document of this hash is of the validation set."""
    return int.from_bytes(digest, "big") < fraction * 2.0 ** (8 * DIGEST)
