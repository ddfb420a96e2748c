"""A rank that trains as any, and writes down what it is fed: a line for each micro-batch, before it is trained on.

python fed_rank.py LOGS WORLD KEY=VALUE...             train.py on WORLD ranks, each of which logs in LOGS/RANK.jsonl
python fed_rank.py LOGS FOLDER STARTED LAUNCHER        one of them
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from gptlite.commands.train import guarded
from gptlite.config import load
from gptlite.data.loader import Batch, Loader
from gptlite.launch.elastic import run_ranks
from gptlite.start.rank import main


class Fed(NamedTuple):
    """A micro-batch that a rank was given: its sample ids, and for each the digest of its tokens and targets."""

    consumed: int  # samples of the steps before
    micro: int
    ids: list[int]
    texts: list[str]


@contextmanager
def feeding(note: Callable[[Loader, Fed], None]) -> Iterator[None]:
    """Tells of each micro-batch before it is trained on."""
    original = Loader.batch

    def batch(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
        given = original(self, consumed_samples, micro_index)
        rows = zip(given.tokens, given.targets, strict=True)
        texts = [hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest()[:16] for a, b in rows]
        note(self, Fed(consumed_samples, micro_index, given.sample_ids.tolist(), texts))
        return given

    with patch.object(Loader, "batch", batch):
        yield


def train(path: Path, arguments: list[str]) -> None:
    """A rank's share of the run."""

    def note(_: Loader, fed: Fed) -> None:
        with path.open("a") as file:
            file.write(json.dumps(fed) + "\n")

    with feeding(note):
        main(arguments)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]) / f"{os.environ['RANK']}.jsonl", sys.argv[2:])
    worker = (__file__, sys.argv[1])
    sys.exit(guarded(lambda: run_ranks(load(sys.argv[3:]), int(sys.argv[2]), time.monotonic(), worker)))
