"""Shards of an output that is being made: each is whole or not there, and says where the next one begins.

OUTPUT.partial/preprocess.json      the settings
               tokenizer/
               shards/000000/       train and val (.bin .idx .meta.json), state.json, skipped.jsonl
               whole/               the output, until it gets its name
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gptlite.data.corpus import TRAIN, VALIDATION, is_held_out, split_writers
from gptlite.data.indexed import IndexedDataset, IndexedWriter
from gptlite.data.tokenizer import Tokenizer
from gptlite.data.verify import verify
from gptlite.files import sync_folder, write_synced
from gptlite.preprocess.blocks import Place
from gptlite.preprocess.encode import Bad, Split
from gptlite.preprocess.inputs import Source
from gptlite.progress import Log, Progress

STATE, SKIPPED = "state.json", "skipped.jsonl"
_PARTS = 4 << 20  # tokens of a long document read back at a time


@dataclass
class Counts:
    """What has been seen: good documents, tokens with their ends, records that are no text, and empty ones."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    skipped: int = 0
    empty: int = 0

    def add(self, other: "Counts") -> None:
        """Adds up."""
        for key, value in asdict(other).items():
            setattr(self, key, getattr(self, key) + value)


class Shard:
    """One shard being written, inside `writing`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, stack: ExitStack):
        self._writers = stack.enter_context(split_writers(folder, tokenizer))
        self._skipped = stack.enter_context((folder / SKIPPED).open("w", encoding="utf-8"))
        spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._long = _LongDocument(stack.enter_context(spool))
        self.counts = Counts()

    def add(self, train: Split, held_out: Split) -> None:
        """Whole documents."""
        for writer, split in zip(self._writers, (train, held_out), strict=True):
            writer.write_documents(split.tokens, split.lengths, split.text_bytes)
            self.counts.add(Counts(split.lengths.size, split.tokens.size, split.text_bytes))

    def add_part(self, part: Split) -> None:
        """Tokens of a document that is too long for one block."""
        self._long.add(part)

    def end_long(self, digest: bytes, fraction: float) -> None:
        """The parts since the last one are a document, of this hash."""
        writer = self._writers[is_held_out(digest, fraction)]
        self.counts.add(Counts(1, self._long.tokens + 1, self._long.text_bytes))
        for tokens, text_bytes in self._long.take():
            writer.write(tokens, text_bytes)
        writer.end_document()

    def drop_long(self) -> None:
        """The parts since the last document are of one that is no text."""
        for _ in self._long.take():
            pass

    def skip(self, bad: Bad, source: Source) -> None:
        """Notes a record that is left out."""
        note = {"file": source.path, "line": bad.line, "reason": bad.reason}
        self._skipped.write(json.dumps(note, ensure_ascii=False) + "\n")
        self.counts.skipped += 1


class _LongDocument:
    """Tokens on the disk, of a document whose hash, and so whose split, is not known before its end."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._dtype = np.dtype(np.int32)
        self.tokens = self.text_bytes = 0

    def add(self, part: Split) -> None:
        self._dtype = part.tokens.dtype
        self._file.write(part.tokens.tobytes())
        self.tokens += part.tokens.size
        self.text_bytes += part.text_bytes

    def take(self) -> Iterator[tuple[np.ndarray, int]]:
        self._file.seek(0)
        text_bytes = self.text_bytes
        while data := self._file.read(_PARTS * self._dtype.itemsize):
            yield np.frombuffer(data, dtype=self._dtype), text_bytes
            text_bytes = 0
        self._file.seek(0)
        self._file.truncate()
        self.tokens = self.text_bytes = 0


class Shards:
    """The shards in `folder`, in order."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self._folder, self._tokenizer = folder, tokenizer
        folder.mkdir(parents=True, exist_ok=True)
        self.place, self.counts = Place(), Counts()
        self._number = 0
        while (path := self._path(self._number) / STATE).is_file():
            state = json.loads(path.read_text(encoding="utf-8"))
            self.place = Place(**state["after"])
            self.counts.add(Counts(**state["counts"]))
            self._number += 1
        for leftover in folder.iterdir():  # half a shard, or one after a shard that was deleted
            if leftover.name.startswith(".") or int(leftover.name) >= self._number:
                shutil.rmtree(leftover)

    def __len__(self) -> int:
        return self._number

    @contextmanager
    def writing(self) -> Iterator["Shard"]:
        """A new shard. It is there once `self.place` has been set to its end and the block is over."""
        temporary = self._folder / f".tmp-{self._number:06d}"
        temporary.mkdir()
        with ExitStack() as stack:
            shard = Shard(temporary, self._tokenizer, stack)
            yield shard
        state = {"after": asdict(self.place), "counts": asdict(shard.counts)}
        write_synced(temporary / STATE, json.dumps(state, indent=2) + "\n")
        sync_folder(temporary)
        temporary.rename(self._path(self._number))
        sync_folder(self._folder)
        self.counts.add(shard.counts)
        self._number += 1

    def merge(self, target: Path, log: Log) -> None:
        """Joins all shards into the folder `target`: train, val, and skipped.jsonl if anything was skipped."""
        about = (self._tokenizer.fingerprint, self._tokenizer.vocab_size, self._tokenizer.eod)
        paths = [self._path(number) for number in range(self._number)]
        size = sum((path / f"{part}.bin").stat().st_size for path in paths for part in (TRAIN, VALIDATION))
        progress = Progress("joining the shards", size, log)
        for part in (TRAIN, VALIDATION):
            with IndexedWriter(target / part, *about) as writer:
                for path in paths:
                    dataset = IndexedDataset(path / part)
                    verify(dataset)
                    writer.append(dataset, progress)
        if self.counts.skipped:
            with open(target / SKIPPED, "wb") as file:
                for path in paths:
                    file.write((path / SKIPPED).read_bytes())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}"
