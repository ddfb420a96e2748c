"""Output in progress: growing token files, and the state from which preprocessing resumes.

OUTPUT.partial/preprocess.json     the settings
               state.json          position in the input, and totals of the output up to there
               train.lengths       tokens of each document, for .idx; also val.lengths
               whole/              the output, until it gets its final name
"""

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from gptlite.data.indexed import Meta
from gptlite.documents import Between, Count, DocumentError, read_json
from gptlite.errors import ConfigError
from gptlite.files import sync_folder, write_whole
from gptlite.progress import Log, Progress
from gptlite.satellites.corpus.write import is_held_out, split_writers
from gptlite.satellites.preprocess.encode import Bad, Split
from gptlite.satellites.preprocess.inputs import Source
from gptlite.satellites.preprocess.pieces import InputPlace
from gptlite.tokenizers.base import Tokenizer

STATE, WHOLE, SKIPPED = "state.json", "whole", "skipped.jsonl"
_PARTS = 4 << 20  # tokens of a long document read back at a time


@dataclass
class Counts:
    """Totals: documents, their tokens with EOD tokens, their bytes of text, skipped bad records, empty documents."""

    documents: Count = 0
    tokens: Count = 0
    text_bytes: Count = 0
    skipped: Count = 0
    empty: Count = 0


@dataclass
class _State:
    after: InputPlace
    counts: Counts
    splits: Annotated[list[Meta], Between(2, 2)]
    skipped: Count


class Output:
    """Output, resumed from the last `save` if there is one. The index is written if `stack` closes without an error."""

    def __init__(self, partial: Path, tokenizer: Tokenizer, stack: ExitStack, log: Log):
        self._state = partial / STATE
        self.place, self.counts = InputPlace(), Counts()
        self._writers = stack.enter_context(split_writers(partial / WHOLE, tokenizer, work=partial))
        self._skipped = stack.enter_context((partial / WHOLE / SKIPPED).open("ab"))
        # Tokens of a long document, kept until its hash is known at its end: the hash selects the split.
        self._long = stack.enter_context(tempfile.TemporaryFile(dir=partial))  # noqa: SIM115
        self._long_bytes = 0
        sync_folder(partial / WHOLE)
        if self._state.exists():
            try:
                self._go_on(read_json(self._state, _State), log)
            except DocumentError as error:
                raise ConfigError(f"{self._state} is damaged: {error}; delete {partial} to start over") from error

    def _go_on(self, state: _State, log: Log) -> None:
        self.place, self.counts = state.after, state.counts
        log(f"resuming after {self.counts.tokens:,} tokens")
        saved = state.splits
        itemsize = self._writers[0].dtype.itemsize
        progress = Progress("checking earlier output", sum(each.tokens for each in saved) * itemsize, log)
        for writer, each in zip(self._writers, saved, strict=True):
            writer.go_on(each, progress)
        self._skipped.seek(state.skipped)
        self._skipped.truncate()

    def save(self, place: InputPlace) -> None:
        """Sync everything to disk. After a kill, preprocessing resumes at `place`."""
        splits = [asdict(writer.save()) for writer in self._writers]
        self._skipped.flush()
        os.fsync(self._skipped.fileno())
        state = {"after": asdict(place), "counts": asdict(self.counts), "splits": splits}
        state["skipped"] = self._skipped.tell()
        write_whole(self._state, json.dumps(state, indent=2) + "\n")

    def add(self, splits: tuple[Split, Split]) -> None:
        """Write whole documents of the training and the held-out split."""
        for writer, split in zip(self._writers, splits, strict=True):
            writer.write_documents(split.tokens, split.lengths, split.text_bytes)
            self._count(split.lengths.size, split.tokens.size, split.text_bytes)

    def add_part(self, part: Split) -> None:
        """Store a part of a document that is too long for one block."""
        self._long.write(part.tokens.tobytes())
        self._long_bytes += part.text_bytes

    def end_long(self, digest: bytes, fraction: float) -> None:
        """Write the parts since the last `begin_long` as one document. `digest` and `fraction` select the split."""
        writer = self._writers[is_held_out(digest, fraction)]
        size, text_bytes = self._long.tell() // writer.dtype.itemsize, self._long_bytes
        self._count(1, size + 1, text_bytes)
        self._long.seek(0)
        while data := self._long.read(_PARTS * writer.dtype.itemsize):
            writer.write(np.frombuffer(data, dtype=writer.dtype), text_bytes)
            text_bytes = 0
        writer.end_document()
        self.begin_long()

    def begin_long(self) -> None:
        """Start a long document. Stored parts of an earlier, bad document are dropped."""
        self._long.seek(0)
        self._long.truncate()
        self._long_bytes = 0

    def skip(self, bad: Bad, source: Source) -> None:
        """Append the location of a bad record, and the reason, to skipped.jsonl."""
        note = {"file": source.path, "line": bad.line, "reason": bad.reason}
        self._skipped.write(json.dumps(note, ensure_ascii=False).encode() + b"\n")
        self.counts.skipped += 1

    def _count(self, documents: int, tokens: int, text_bytes: int) -> None:
        self.counts.documents += documents
        self.counts.tokens += tokens
        self.counts.text_bytes += text_bytes
