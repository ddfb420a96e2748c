"""SentencePiece: the tokenizer learned from the training text."""

import io
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from gptlite.data.tokenizer import UNKNOWN, Tokenizer
from gptlite.errors import ConfigError
from gptlite.progress import Log

_CHUNK = 1 << 16  # characters one thread encodes at a time


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with byte fallback (Kudo and Richardson 2018). `eod` is its end-of-sentence piece.

    SentencePiece writes a space as U+2581, so that one character reads back as a space.
    """

    kind = "sentencepiece"
    _model_file = "tokenizer.model"

    def __init__(self, model: bytes):
        processor = _sentencepiece().SentencePieceProcessor(model_proto=model)
        self.model = model
        self._processor = processor
        super().__init__([self._bytes_of(token) for token in range(processor.vocab_size())], eod=processor.eos_id())

    def _bytes_of(self, token: int) -> bytes:
        piece = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # "<0x0A>"
        if self._processor.is_control(token):
            return b""
        return (UNKNOWN if self._processor.is_unknown(token) else piece.replace("\u2581", " ")).encode()

    def definition(self) -> bytes:
        return self.model

    def encode(self, text: str) -> list[int]:
        chunks = list(_line_chunks(text, _CHUNK))
        return list(chain.from_iterable(self._processor.encode(chunks, num_threads=_num_threads())))

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / self._model_file).write_bytes(self.model)

    @classmethod
    def load(cls, folder: Path) -> "SentencePieceTokenizer":
        """The model that `save` wrote into `folder`."""
        return cls((folder / cls._model_file).read_bytes())


def train_sentencepiece(lines: Iterable[str], vocab_size: int, log: Log) -> SentencePieceTokenizer:
    """A byte-fallback BPE of at most `vocab_size` ids. A text too small for as many gets what it has, and is told.

    Raises ConfigError if `vocab_size` has no room for the 256 bytes and the characters of the text.
    """
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 30,  # longer lines would be skipped without a word
            num_threads=_num_threads(),
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        fix = f"take at least {needed[1]}" if needed else " ".join(str(error).split())
        raise ConfigError(f"data.vocab_size={vocab_size} has no room for the text's characters; {fix}") from error
    tokenizer = SentencePieceTokenizer(model.getvalue())
    if tokenizer.vocab_size < vocab_size:
        log(f"tokenizer: the text has only {tokenizer.vocab_size} pieces, fewer than data.vocab_size={vocab_size}")
    return tokenizer


def _line_chunks(text: str, size: int) -> Iterator[str]:
    # No piece we train holds a newline, so ids do not depend on where between two lines the text is cut.
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sentencepiece():
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            "data.tokenizer=sentencepiece needs a missing package; pip install sentencepiece, or data.tokenizer=char"
        ) from None
    return sentencepiece
