"""SentencePiece a word at a time: the ids of a text from those of its words, each encoded once.

A BPE merges two neighbours only into a piece of its vocabulary. So where no piece of more than one character has a
newline in it, and none a space after another character, no merge ever crosses a newline or the place before a word's
space. What stands between two such places is encoded alike alone and in its text: the merges in it have the same order
(score, then from the left), and no other touches it.
"""

import re
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

SPACE = "\u2581"  # how SentencePiece writes a space; one in the text is a space to it
_WORD = re.compile(rf"[ {SPACE}]*+[^ {SPACE}\n]+|[ {SPACE}]+|\n+")
_CUT = re.compile(rf"\n|(?<=[^ {SPACE}])(?= )")
_CROSSING = re.compile(rf"[^ {SPACE}][ {SPACE}]")
_CHUNK = 1 << 16  # characters of one pass
_LONGEST = 1 << 20  # characters without a place to cut, from where on they are cut all the same
_CACHED = 64 << 20  # bytes
_ENTRY = 200  # bytes that Python takes for an entry, beside its contents
_BPE = 2


class WordEncoder:
    """Encodes by words that it remembers, up to 64 MiB of them."""

    def __init__(self, processor: Any):
        self._processor = processor
        (self._newline,) = processor.encode("\n")  # one id, as no piece has it among others
        self._ids: dict[str, bytes] = {}
        self._size = 0

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text of any length; one without a newline or space for a million characters is cut there."""
        return np.frombuffer(b"".join(map(self._encode_chunk, _chunks(text))), dtype=np.int32)

    def _encode_chunk(self, chunk: str) -> bytes:
        words = _WORD.findall(chunk)
        try:
            return b"".join(map(self._ids.__getitem__, words))
        except KeyError:
            self._learn([word for word in set(words) if word not in self._ids])
        ids = b"".join(map(self._ids.__getitem__, words))
        if self._size > _CACHED:
            self._ids.clear()
            self._size = 0
        return ids

    def _learn(self, words: list[str]) -> None:
        # In one text, a line each: given a list, SentencePiece starts a thread for every call, and waiting for threads
        # to start took a third of two workers' time on two cores.
        lines = [word for word in words if word[0] != "\n"]
        ids = array("i", self._processor.encode("".join(line + "\n" for line in lines)))
        start = 0
        for line in lines:
            stop = ids.index(self._newline, start)
            self._remember(line, ids[start:stop])
            start = stop + 1
        for newlines in set(words).difference(lines):
            self._remember(newlines, array("i", [self._newline]) * len(newlines))

    def _remember(self, word: str, ids: "array[int]") -> None:
        self._ids[word] = ids.tobytes()
        self._size += _ENTRY + len(word) + 4 * len(ids)


def encodes_by_words(model: bytes, pieces: list[str]) -> bool:
    """Whether the words of a text have the same ids alone. `pieces`: all that are matched in text.

    Only for a BPE with byte fallback (else unknown characters in a row become one id) that changes nothing in the text
    first: no normalization, no space before it, none taken away.
    """
    trainer, normalizer = ({}, {})
    for number, value in _fields(model):
        if number == 2 and isinstance(value, bytes):
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
    """Numbers and values of a protocol buffer's fields (protobuf.dev/programming-guides/encoding)."""
    at = 0

    def varint() -> int:
        nonlocal at
        start = at
        while message[at] & 0x80:
            at += 1
        at += 1
        return sum((byte & 0x7F) << 7 * n for n, byte in enumerate(message[start:at]))

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield number, message[at : at + size]
        at += size
