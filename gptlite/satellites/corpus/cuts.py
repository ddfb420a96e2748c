"""Cuts of long texts that do not change their tokens, so that texts of any length are encoded a part at a time.

A tokenizer may add a space before a text, or join characters across a line end (GPT-2's and Llama 3's patterns do, and
SentencePiece pieces may). A cut is made where the tokens on both sides are those of the whole text, as far as a window
of WINDOW bytes shows, and the part after it is encoded behind the end of the part before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

from gptlite.tokenizers.base import Tokenizer

WINDOW = 4096  # bytes on each side of a cut
PART = 1 << 20  # bytes; texts are cut only above
_TRIED = 64  # places of each kind that are tried


def encoded(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids of a text, int32[N] at a time, with the bytes that they encode. `blocks` are the text, in order."""
    held, context, size = bytearray(), "", PART
    for block in blocks:
        held += block.encode()
        if len(held) < size + WINDOW:
            continue
        if not (stop := last_cut(tokenizer, held, len(held) - WINDOW)):
            size = len(held) + PART  # before it is tried again
            continue
        yield encode_after(tokenizer, context, held[:stop].decode()), stop
        context, size = context_before(held, stop), PART
        del held[:stop]
    if held:
        yield encode_after(tokenizer, context, held.decode()), len(held)


def encode_after(tokenizer: Tokenizer, context: str, text: str) -> np.ndarray:
    """Return the ids of `text`, int32[N], as they are behind `context`, from which a cut divides it."""
    if not context:
        return tokenizer.encode_array(text)
    return tokenizer.encode_array(context + text)[len(tokenizer.encode_array(context)) :]


def context_before(data: bytes | bytearray, stop: int) -> str:
    """Return the text before a cut that `encode_after` needs."""
    return data[max(0, stop - WINDOW) : stop].decode("utf-8", errors="ignore")


def last_cut(tokenizer: Tokenizer, data: bytes | bytearray, most: int) -> int:
    """Return the last place in UTF-8 `data`, up to `most`, where a cut changes no tokens, or 0 if none was found.

    Line ends are tried first, then spaces, then any character.
    """
    for stop in chain(_before(data, most, b"\n", after=True), _before(data, most, b" "), _characters(data, most)):
        left, right = context_before(data, stop), data[stop : stop + WINDOW].decode("utf-8", errors="ignore")
        ids = tokenizer.encode_array(left)
        if np.array_equal(tokenizer.encode_array(left + right)[: len(ids)], ids):
            return stop
    return 0


def _before(data: bytes | bytearray, most: int, character: bytes, after: bool = False) -> Iterator[int]:
    """Yield the last places of a character before `most`, or the places after it."""
    place = most
    for _ in range(_TRIED):
        if (place := data.rfind(character, 0, place)) <= 0:
            return
        yield place + after


def _characters(data: bytes | bytearray, most: int) -> Iterator[int]:
    """Yield the last places at which a character begins."""
    yield from islice((place for place in range(most, 0, -1) if data[place] & 0xC0 != 0x80), _TRIED)
