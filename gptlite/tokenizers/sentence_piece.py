"""SentencePiece tokenizers and their training."""

import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gptlite.errors import ConfigError, needed_package
from gptlite.progress import Log
from gptlite.tokenizers.base import UNKNOWN, Tokenizer
from gptlite.tokenizers.sentence_piece_words import SPACE, WordEncoder, encodes_by_words


@dataclass
class _Settings:
    eod: str = ""


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a SentencePiece model (Kudo and Richardson 2018).

    `eod` is the control piece that ends documents, if not the model's end-of-sentence piece.

    SentencePiece writes a space as U+2581, so U+2581 in a text decodes to a space. Models trained by gptlite lose
    nothing else; other models may normalize the text, or add a space before it. `processor` is the
    SentencePieceProcessor. Raises ConfigError for bytes that are not a model, or without a control piece for `eod`.
    """

    kind = "sentencepiece"
    file = "tokenizer.model"
    saved = _Settings

    def __init__(self, model: bytes, eod: str = ""):
        try:
            processor = _sentencepiece().SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ConfigError("it is not a SentencePiece model") from error
        self.processor = processor
        ids = range(processor.vocab_size())
        settings = {"eod": eod} if eod else {}
        super().__init__([self._bytes_of(token) for token in ids], self._end(eod), settings, model)
        self.bos = processor.bos_id() if processor.bos_id() >= 0 else None
        matched = [processor.id_to_piece(n) for n in ids if not processor.is_byte(n) and not processor.is_control(n)]
        self._words = WordEncoder(processor) if encodes_by_words(model, matched) else None
        self.keeps_bytes = self._words is not None  # only these models are known to change nothing

    def _end(self, eod: str) -> int:
        """Return the id of the piece that ends documents. No text is encoded as a control piece."""
        found = self.processor.piece_to_id(eod) if eod else self.processor.eos_id()
        if found >= 0 and self.processor.is_control(found):
            return found
        pieces = range(self.processor.vocab_size())
        names = [self.processor.id_to_piece(token) for token in pieces if self.processor.is_control(token)]
        lacks = f"control piece {eod}" if eod else "end-of-sentence piece"
        fix = f"give eod= one of its control pieces, {', '.join(names[:20])}" if names else "give another tokenizer"
        raise ConfigError(f"the SentencePiece model has no {lacks} to end documents with; {fix}")

    def _bytes_of(self, token: int) -> bytes:
        piece = self.processor.id_to_piece(token)
        if self.processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # "<0x0A>"
        if self.processor.is_control(token):
            return b""
        return (UNKNOWN if self.processor.is_unknown(token) else piece.replace(SPACE, " ")).encode()

    @property
    def encodes_by_words(self) -> bool:
        """True if words can be encoded separately, as for a model trained by gptlite."""
        return self._words is not None

    def definition(self) -> bytes:
        return self._content + (b"\0" + self._settings["eod"].encode() if self._settings else b"")

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        if self._words is not None:
            return self._words.encode(text)
        return np.array(self.processor.encode(text), dtype=np.int32)


def train_sentencepiece(
    lines: Iterable[str], vocab_size: int, log: Log, key: str = "data.vocab_size"
) -> SentencePieceTokenizer:
    """Train a byte-fallback BPE of at most `vocab_size` ids. A small text may yield fewer ids, which is logged.

    Raises ConfigError, naming `key`, if `vocab_size` is too small for the 256 bytes and the text's characters.
    """
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # otherwise a text that yields fewer pieces is an error
            byte_fallback=True,  # every text can be encoded, and decoded without loss
            # Encoding is lossless: no normalization, no added or removed spaces.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 30,  # longer lines would be skipped silently
            num_threads=_num_threads(),
            minloglevel=2,  # errors only
        )
    except RuntimeError as error:
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if not needed:
            reason = " ".join(str(error).split())
            raise ConfigError(f"the tokenizer could not be trained with {key}={vocab_size}: {reason}") from error
        raise ConfigError(
            f"{key}={vocab_size} is too small for the text's characters; give at least {needed[1]}"
        ) from error
    tokenizer = SentencePieceTokenizer(model.getvalue())
    if tokenizer.vocab_size < vocab_size:
        log(f"tokenizer: the text yields only {tokenizer.vocab_size} pieces, fewer than {key}={vocab_size}")
    return tokenizer


def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sentencepiece():
    with needed_package("sentencepiece", "data.tokenizer=sentencepiece", ", or data.tokenizer=char"):
        import sentencepiece
    return sentencepiece
