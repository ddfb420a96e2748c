"""Micro-batches and the loader interface, shared by tokens and by samples of a dataset."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gptlite.data.batches import BatchSchedule
from gptlite.data.eras import Era
from gptlite.data.stream import SampleStream
from gptlite.ops.inputs import Documents


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: B sequences of S tokens, where S is the number of positions that the rank holds."""

    tokens: torch.Tensor  # int64[B, S]
    targets: torch.Tensor  # int64[B, S], IGNORE where nothing is predicted
    sample_ids: torch.Tensor  # int64[B], numbers of the run's samples, or of chunks in validation; negative: a filler
    documents: Documents | None = None  # boundaries in the whole sequences, also under context parallelism
    counted: bool = True  # False for a filler, so that every rank has the same number of batches

    @property
    def length(self) -> int:
        """Number of positions of a sequence on this rank."""
        return self.tokens.shape[1]

    def pin_memory(self) -> "Batch":
        """Return a copy in page-locked memory, so that its transfer to a GPU can overlap computation."""
        return self.each(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`. The copy is asynchronous from pinned memory."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        documents = None if self.documents is None else self.documents.each(change)
        tensors = {name: change(getattr(self, name)) for name in ("tokens", "targets", "sample_ids")}
        return replace(self, **tensors, documents=documents)


@dataclass(frozen=True)
class Share:
    """Share of each global batch that data-parallel rank `rank` of `size` reads.

    `positions` are the rank's positions in each sample; None: all.
    """

    rank: int = 0
    size: int = 1
    positions: np.ndarray | None = None


WHOLE = Share()


class BatchLoader(ABC):
    """Base class of loaders, which divide the run's sample stream into global batches, and these into micro-batches.

    `schedule` gives the samples of a global batch. For micro-batch size B and R data-parallel ranks, each micro-batch
    takes the next B * R samples: the first B for rank 0, and so on. So the global batch does not depend on R. A batch
    depends on `consumed_samples` and not on earlier calls, so a resumed run reads the same batches. A new `schedule`
    takes effect with the next batch.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        schedule: BatchSchedule,
        micro_batch_size: int,
        device: torch.device,
        share: Share = WHOLE,
    ) -> None:
        self.stream = self._begun = stream
        self.schedule, self.micro_batch_size = schedule, micro_batch_size
        self._device, self._share = device, share

    @property
    def global_batch_size(self) -> int:
        """Number of samples in a global batch at full size, after any ramp."""
        return self.schedule.global_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in a global batch of full size on this rank."""
        return -(-self.global_batch_size // self._samples_at_once)

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches on this rank in the global batch after `consumed_samples` samples."""
        return -(-self.schedule.size(consumed_samples) // self._samples_at_once)

    @property
    def _samples_at_once(self) -> int:
        """Number of samples in one micro-batch, summed over all data-parallel ranks."""
        return self.micro_batch_size * self._share.size

    def _numbers(self, consumed_samples: int) -> np.ndarray:
        """Return the numbers of this rank's samples in a global batch: int64[micro-batches, micro-batch size].

        In an elastic run, fillers complete the last micro-batch of all ranks: ~n is sample n again, without targets.
        """
        numbers = self.schedule.samples(consumed_samples)
        numbers = np.concatenate([numbers, np.full(-len(numbers) % self._samples_at_once, ~numbers[0])])
        return numbers.reshape(-1, self._share.size, self.micro_batch_size)[:, self._share.rank]

    def resume(self, history: Sequence[Era], consumed_samples: int) -> None:
        """Continue the eras of a checkpoint after `consumed_samples` samples. `history` is empty for a new run."""
        self.stream = self._begun.resumed(history, consumed_samples)

    @abstractmethod
    def batch(self, consumed_samples: int, micro_index: int) -> Batch:
        """Return micro-batch `micro_index` of the global batch after `consumed_samples` samples.

        The result does not depend on earlier calls.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop prefetching. `batch` fails afterwards; validation still works."""

    @property
    @abstractmethod
    def validation_sets(self) -> list[str]:
        """Names of the data sets that have held-out samples."""

    @abstractmethod
    def validation_batches(self, limit: int | None = None, name: str | None = None) -> Iterator[Batch]:
        """Yield this rank's batches of all held-out samples of data set `name`, or of `limit` evenly spaced ones.

        `name` defaults to the first set. Every rank gets the same number of batches, and each sample counts once.
        """

    @abstractmethod
    def _num_validation_samples(self, name: str) -> int:
        """Return the number of held-out samples of a data set."""

    def num_validation_batches(self, limit: int | None = None, name: str | None = None) -> int:
        """Return the number of batches of `validation_batches(limit, name)`."""
        total = self._num_validation_samples(name or self.validation_sets[0])
        return -(-len(spread(total, limit)) // self._samples_at_once)

    def validation_bytes(self, limit: int | None = None, name: str | None = None) -> int:
        """Return the number of UTF-8 bytes of all targets in `validation_batches(limit, name)`, summed over all ranks.

        The result is 0 if the targets are not text.
        """
        return 0


def spread(total: int, limit: int | None) -> np.ndarray:
    """Return `limit` evenly spaced numbers of range(total), or all of them if `limit` is None: int64[N]."""
    count = total if limit is None else min(limit, total)
    return np.arange(count) * total // max(count, 1)
