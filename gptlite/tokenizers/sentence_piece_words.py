"""Word cache for SentencePiece encoding: each word is encoded once, and a text's ids are the ids of its words.

A BPE merges two neighbours only into a piece of its vocabulary. Suppose that no piece of more than one character
contains a newline, and that no piece has a space after another character. Then no merge crosses a newline or the
boundary before a word's space. The text between two boundaries gets the same ids alone and in context: its merges keep
their order (by score, then from the left), and no other merge affects it.
"""

import re
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from gptlite.errors import ConfigError

SPACE = "\u2581"  # SentencePiece writes a space as this character, and decodes this character as a space
_WORD = re.compile(rf"[ {SPACE}]*+[^ {SPACE}\n]+|[ {SPACE}]+|\n+")
_CUT = re.compile(rf"\n|(?<=[^ {SPACE}])(?= )")
_CROSSING = re.compile(rf"[^ {SPACE}][ {SPACE}]")
_CHUNK = 1 << 16  # characters encoded at a time
# SentencePiece takes hundreds of bytes of memory per character.
_LONGEST = 1 << 20  # a longer run of characters without a boundary is cut nevertheless
_CACHED = 64 << 20  # bytes
_ENTRY = 200  # bytes of Python overhead per cache entry
_BPE = 2
_VARINT = 10  # bytes of the longest number in a protocol buffer


class WordEncoder:
    """Encoder that caches the ids of words, in up to 64 MiB of memory."""

    def __init__(self, processor: Any):
        self._processor = processor
        (self._newline,) = processor.encode("\n")  # one id, since no longer piece contains a newline
        self._ids: dict[str, bytes] = {}
        self._size = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32[N]. Runs of over a million characters without newline or space are cut."""
        return np.frombuffer(b"".join(map(self._encode_chunk, _chunks(text))), dtype=np.int32)

    def _encode_chunk(self, chunk: str) -> bytes:
        chunk_words = _WORD.findall(chunk)
        try:
            return b"".join(map(self._ids.__getitem__, chunk_words))
        except KeyError:  # cheaper than checking every word, since most are cached
            self._learn([word for word in set(chunk_words) if word not in self._ids])
        ids = b"".join(map(self._ids.__getitem__, chunk_words))
        if self._size > _CACHED:
            self._ids.clear()  # all of them, since it is unknown which words will recur
            self._size = 0
        return ids

    def _learn(self, unseen: list[str]) -> None:
        # The words go into one text, one per line. Given a list, SentencePiece starts threads on every call, which took
        # a third of the time of two workers on two cores.
        lines = [word for word in unseen if word[0] != "\n"]
        ids = array("i", self._processor.encode("".join(line + "\n" for line in lines)))
        start = 0
        for line in lines:
            stop = ids.index(self._newline, start)
            self._remember(line, ids[start:stop])
            start = stop + 1
        for newlines in set(unseen).difference(lines):
            self._remember(newlines, array("i", [self._newline]) * len(newlines))

    def _remember(self, word: str, ids: "array[int]") -> None:
        self._ids[word] = ids.tobytes()
        self._size += _ENTRY + len(word) + 4 * len(ids)


def encodes_by_words(model: bytes, pieces: list[str]) -> bool:
    """Return True if words can be encoded separately. `model` is serialized; `pieces` are its pieces that match text.

    The model must be a BPE with byte fallback (otherwise a run of unknown characters becomes one id) that does not
    change the text first: no normalization, no added prefix space, no removed spaces.
    """
    trainer, normalizer = ({}, {})
    for number, value in _fields(model):
        if number == 2 and isinstance(value, bytes):  # field numbers are those of sentencepiece_model.proto
            trainer = dict(_fields(value))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    plain = not normalizer.get(2) and not normalizer.get(6) and [normalizer.get(n, 1) for n in (3, 4, 5)] == [0, 0, 1]
    bpe = trainer.get(3, 1) == _BPE and trainer.get(35, 0) == 1 and not trainer.get(24, 0)
    return plain and bpe and not any(_CROSSING.search(p) or ("\n" in p and len(p) > 1) for p in pieces)


def _chunks(text: str) -> Iterator[str]:
    if len(text) <= _CHUNK:
        yield text
        return
    start = 0
    while start < len(text):
        limit = start + _CHUNK + _LONGEST
        cut = _CUT.search(text, start + _CHUNK, limit)
        stop = cut.end() if cut else limit
        yield text[start:stop]
        start = stop


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a protocol buffer (protobuf.dev/programming-guides/encoding).

    Raises ConfigError for a damaged one.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        part = message[at : at + _VARINT]
        size = next((n for n, byte in enumerate(part, 1) if not byte & 0x80), None)
        if size is None:
            raise ConfigError(f"the SentencePiece model is damaged: byte {at} does not begin a number")
        at += size
        return sum((byte & 0x7F) << 7 * n for n, byte in enumerate(part[:size]))

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, len(message))
        if at + size > len(message):
            raise ConfigError(f"the SentencePiece model is damaged: the field at byte {at} is longer than the file")
        yield number, message[at : at + size]
        at += size
