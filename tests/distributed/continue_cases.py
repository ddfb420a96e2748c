"""What ranks do in test_continue.py: a run as train.py starts it, and the samples that each step is fed."""

from __future__ import annotations

import hashlib
import os
import signal
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from distributed.reshard_cases import joined
from gptlite.config import Config
from gptlite.data.loader import Batch, Loader
from gptlite.parallelism.layout import resolve
from gptlite.pretrain import pretrain


@dataclass(frozen=True)
class Fed:
    """A micro-batch that a rank was given: its sample ids, and for each the digest of its tokens and targets."""

    consumed: int  # samples of the steps before
    micro: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Trained:
    """A rank's exit code, which part of the global batch it reads, and what it was fed, in order."""

    code: int
    data_rank: int
    data_size: int
    fed: list[Fed]


def train(config: Config, world: int, name: str, stop_at: int | None = None) -> Trained | None:
    """On the first `world` ranks: `pretrain`. In step `stop_at` the last of them gets a SIGTERM."""
    fed: list[Fed] = []
    original, rank = Loader.batch, int(os.environ["RANK"])

    def batch(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
        given = original(self, consumed_samples, micro_index)
        texts = tuple(_digest(*row) for row in zip(given.tokens, given.targets, strict=True))
        begins = stop_at is not None and consumed_samples == self.schedule.after(0, stop_at - 1) and micro_index == 0
        if begins and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        fed.append(Fed(consumed_samples, micro_index, tuple(given.sample_ids.tolist()), texts))
        return given

    with joined(world, name) as is_in, patch.object(Loader, "batch", batch):
        if not is_in:
            return None
        layout = resolve(config.parallelism, world)
        inner = layout.context * layout.size("tp")
        return Trained(pretrain(config), rank // inner % layout.data_size, layout.data_size, fed)


def _digest(*tensors: Any) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
