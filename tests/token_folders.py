"""Prepared folders of bytes, as `gptlite preprocess` leaves them, and Megatron's own files."""

import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.satellites.corpus.indexed import IndexedWriter
from gptlite.tokenizers.base import ByteTokenizer, Tokenizer

WORDS = "the a cat dog mat sat ran lay on under after no minds ärger weiß".split()


def documents(seed: int, count: int, words: int = 30) -> list[str]:
    """Text that is another one for every seed; some letters are of two bytes."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, words))) for _ in range(count)]


def write_numbers(
    prefix: Path, documents: Iterable[Sequence[int]] = ((5, 6, 7), (), (8,)), vocab_size: int = 10
) -> Path:
    """Documents of numbers, each ended by 9 and said to be of two bytes a token."""
    with IndexedWriter(prefix, "fingerprint", vocab_size, 9) as writer:
        for document in documents:
            writer.write(list(document), text_bytes=2 * len(document))
            writer.end_document()
    return prefix


def write_folder(root: Path, tokenizer: Tokenizer | None = None, **splits: Sequence[str]) -> Path:
    """`root` with tokenizer/ and the documents of each split, by default those of a seed made of its name."""
    tokenizer = tokenizer or ByteTokenizer()
    texts: Mapping[str, Sequence[str]] = splits or {
        "train": documents(sum(root.name.encode()), 60),
        "val": documents(sum(root.name.encode()) + 1, 8),
    }
    for split, each in texts.items():
        with IndexedWriter(root / split, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod) as writer:
            for text in each:
                writer.write(tokenizer.encode(text), len(text.encode()))
                writer.end_document()
    tokenizer.save(root / "tokenizer")
    return root


def write_megatron(
    prefix: Path, bodies: Sequence[Sequence[Sequence[int]]], dtype: Any = np.uint16, modes: Sequence[int] = ()
) -> Path:
    """Documents of several sequences; those without any have an index alone."""
    code = {np.uint16: 8, np.int32: 4, np.int64: 5, np.uint8: 1}[dtype]
    sequences = [each for body in bodies for each in body]
    lengths = np.array([len(each) for each in sequences], dtype="<i4")
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    indices = np.cumsum([0, *(len(body) for body in bodies)])
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(indices))
    arrays = lengths.tobytes() + pointers.astype("<i8").tobytes() + indices.astype("<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(header + arrays + bytes(modes))
    prefix.with_name(prefix.name + ".bin").write_bytes(np.array([*chain(*sequences)], dtype=dtype).tobytes())
    return prefix
