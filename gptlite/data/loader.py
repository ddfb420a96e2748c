"""The loader of token data: micro-batches as a pure function of the number of consumed samples."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from gptlite.data.batch_loader import WHOLE, Batch, BatchLoader, Share, spread
from gptlite.data.batches import BatchSchedule
from gptlite.data.indexed import outside
from gptlite.data.stream import SampleStream, num_chunks, read_chunk
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.ops.inputs import IGNORE, Documents

_BLOCK = 1 << 22  # tokens read at a time
_Key = tuple[BatchSchedule, SampleStream, int]  # the int is the number of samples before the step


@dataclass(frozen=True)
class HeldOut:
    """Held-out tokens of each data set, int[N], with what their losses per byte need: the bytes of each token id, and
    those of each set's text, None if they are the sum of its tokens'."""

    tokens: Mapping[str, np.ndarray]
    token_bytes: np.ndarray
    text_bytes: Mapping[str, int | None]


class Loader(BatchLoader):
    """Loader of sequences of tokens. With `document_end`, the id that ends a document, batches carry the document
    boundaries, and nothing is predicted from that id."""

    def __init__(
        self,
        stream: SampleStream,
        held_out: HeldOut,
        *,
        schedule: BatchSchedule,
        micro_batch_size: int,
        device: torch.device,
        share: Share = WHOLE,
        document_end: int | None = None,
    ):
        super().__init__(stream, schedule=schedule, micro_batch_size=micro_batch_size, device=device, share=share)
        self._held_out = held_out
        self._length = stream.eras[-1].sequence_length
        self._document_end = document_end
        # One thread: reads are in the order of the steps.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        # Micro-batches of the current step and of the next one, with the keys that determine them.
        self._now: tuple[_Key, list[Batch]] | None = None
        self._ahead: tuple[_Key, Future[list[Batch]]] | None = None
        self._bytes_counted: dict[tuple[str, int], int] = {}

    def batch(self, consumed_samples: int, micro_index: int) -> Batch:
        """Return a micro-batch, see BatchLoader.

        All micro-batches of a step are read together, and those of the next step are read ahead in a background thread.
        A micro-batch takes 8 bytes per token and 8 per target. An error in the background thread is raised here when
        the affected step is requested.
        """
        key = self.schedule, self.stream, consumed_samples
        if self._now is None or self._now[0] != key:
            self._now = None
            if self._ahead is not None and self._ahead[0] != key:
                self._ahead[1].cancel()
                self._ahead = None
            reading = self._ahead[1] if self._ahead else self._thread.submit(self._read, consumed_samples)
            self._ahead = None  # a failed read is retried on the next request
            self._now = key, reading.result()
            following = self.schedule.after(consumed_samples)
            self._ahead = (*key[:2], following), self._thread.submit(self._read, following)
        return self._now[1][micro_index].to(self._device)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    @property
    def validation_sets(self) -> list[str]:
        return list(self._held_out.tokens)

    def _num_validation_samples(self, name: str) -> int:
        return num_chunks(self._held_out.tokens[name], self._length)

    def validation_batches(self, limit: int | None = None, name: str | None = None) -> Iterator[Batch]:
        """Yield this rank's batches of held-out chunks, in file order, see BatchLoader.

        All batches have the same shape: the last chunk and the last batch are padded, with targets IGNORE.
        """
        held_out = self._held_out.tokens[name or self.validation_sets[0]]
        chunks = spread(num_chunks(held_out, self._length), limit)
        for start in range(0, len(chunks), self._samples_at_once):
            begin = start + self._share.rank * self.micro_batch_size
            yield self._collate_chunks(held_out, chunks[begin : begin + self.micro_batch_size]).to(self._device)

    def validation_bytes(self, limit: int | None = None, name: str | None = None) -> int:
        """Return the number of bytes of the targets, see BatchLoader.

        With the total loss in nats, bits per byte = nats / ln 2 / bytes. `eod` has no bytes, so the end of a document
        adds bits but no bytes. Where a tokenizer changes texts, e.g. normalizes them or adds a space, the bytes are
        those of the text, of which each target has a share as its piece has of all pieces.
        """
        name = name or self.validation_sets[0]
        held_out = self._held_out.tokens[name]
        chunks = spread(num_chunks(held_out, self._length), limit)
        if (name, len(chunks)) not in self._bytes_counted:
            counts = (self._bytes(read_chunk(held_out, chunk, self._length)) for chunk in chunks.tolist())
            self._bytes_counted[name, len(chunks)] = round(sum(counts) * self._text_per_piece(name))
        return self._bytes_counted[name, len(chunks)]

    def _text_per_piece(self, name: str) -> float:
        """Return the bytes of a set's held-out text per byte of its tokens' pieces."""
        if (size := self._held_out.text_bytes[name]) is None:
            return 1.0
        held_out, pieces = self._held_out.tokens[name], 0
        for start in range(0, len(held_out), _BLOCK):
            pieces += int(self._held_out.token_bytes[held_out[start : start + _BLOCK]].sum())
        return size / pieces if pieces else 1.0

    def _bytes(self, values: np.ndarray) -> int:
        counted = values[1:] if self._document_end is None else values[1:][values[:-1] != self._document_end]
        return int(self._held_out.token_bytes[counted].sum())

    def _read(self, consumed_samples: int) -> list[Batch]:
        numbers = self._numbers(consumed_samples)
        rows = self.stream.read(np.maximum(numbers, ~numbers).reshape(-1))
        self._require_known(rows, lambda row: f"sample {numbers.reshape(-1)[row]} of the run")
        shape = (*numbers.shape, rows.shape[1] - 1)
        tokens, targets = (part.astype(np.int64).reshape(shape) for part in (rows[:, :-1], rows[:, 1:]))
        targets[numbers < 0] = IGNORE
        batches = [self._batch(*each) for each in zip(tokens, targets, numbers, strict=True)]
        # Pinned in the background thread, since pinning copies the data.
        return [batch.pin_memory() for batch in batches] if self._device.type == "cuda" else batches

    def _require_known(self, rows: np.ndarray, name: Callable[[int], str]) -> None:
        """Raise ConfigError for an id outside the vocabulary, which opening a file does not detect.

        `name` describes a row by its index, for the message.
        """
        size = len(self._held_out.token_bytes)
        if (place := outside(rows.reshape(-1), size)) is not None:
            row, column = divmod(place, rows.shape[1])
            raise ConfigError(
                f"{name(row)} has token id {rows[row, column]}, outside the vocabulary of {size}: its file is "
                f"damaged; locate the damage with {command('data')} verify FOLDER"
            )

    def _collate_chunks(self, held_out: np.ndarray, chunks: np.ndarray) -> Batch:
        """Return a micro-batch of held-out chunks, padded to full size."""
        shape = (self.micro_batch_size, self._length)
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        ids = np.zeros(self.micro_batch_size, dtype=np.int64)
        ids[: len(chunks)] = chunks
        for row, chunk in enumerate(chunks.tolist()):
            values = read_chunk(held_out, chunk, self._length)
            self._require_known(values[None], lambda _, chunk=chunk: f"held-out chunk {chunk}")
            tokens[row, : len(values) - 1] = values[:-1]
            targets[row, : len(values) - 1] = values[1:]
        return self._batch(tokens, targets, ids)

    def _batch(self, tokens: np.ndarray, targets: np.ndarray, ids: np.ndarray) -> Batch:
        """Return this rank's part of whole sequences, with document boundaries if `document_end` is set."""
        documents = None
        if self._document_end is not None:
            targets[tokens == self._document_end] = IGNORE
            documents = documents_in(tokens, self._document_end)
        if (positions := self._share.positions) is not None:
            tokens, targets = tokens[:, positions], targets[:, positions]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(ids), documents)


def document_starts(tokens: np.ndarray, end: int) -> np.ndarray:
    """Return the position in the row at which each token's document begins: int64[B, S]. `end` ends a document."""
    starts = np.zeros_like(tokens)
    begins = np.nonzero(tokens[:, :-1] == end)
    starts[begins[0], begins[1] + 1] = begins[1] + 1  # a document begins after the end of the one before
    return np.maximum.accumulate(starts, axis=1)


def documents_in(tokens: np.ndarray, end: int) -> Documents:
    """Return the documents of `tokens` [B, S]. Each is ended by `end` or by the end of its row."""
    starts, (rows, length) = document_starts(tokens, end), tokens.shape
    begins = starts == np.arange(length)
    most = _power_of_two(int(begins.sum(1).max(initial=1)))
    ends, longest = np.full((rows, min(most, length)), length), 1
    for row in range(rows):
        places = np.flatnonzero(begins[row])
        ends[row, : len(places) - 1] = places[1:]
        longest = max(longest, int(np.diff(places, append=length).max()))
    ends += length * np.arange(rows)[:, None]
    return Documents(
        torch.from_numpy(starts), torch.from_numpy(ends.astype(np.int32)), min(_power_of_two(longest), length)
    )


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
