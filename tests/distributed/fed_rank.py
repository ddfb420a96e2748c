"""A rank that trains as any, and writes down what it is fed: a line for each micro-batch, before it is trained on.

python fed_rank.py LOGS WORLD KEY=VALUE...             train.py on WORLD ranks, each of which logs in LOGS/RANK.jsonl
python fed_rank.py LOGS FOLDER STARTED LAUNCHER        one of them
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

from gptlite.commands.train import guarded
from gptlite.config import load
from gptlite.data.loader import Batch, Loader
from gptlite.launch.elastic import run_ranks
from gptlite.launch.worker import main


def train(logs: Path, arguments: list[str]) -> None:
    """A rank's share of the run."""
    original, path = Loader.batch, logs / f"{os.environ['RANK']}.jsonl"

    def batch(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
        given = original(self, consumed_samples, micro_index)
        rows = zip(given.tokens, given.targets, strict=True)
        texts = [hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest()[:16] for a, b in rows]
        with path.open("a") as file:
            file.write(json.dumps([consumed_samples, micro_index, given.sample_ids.tolist(), texts]) + "\n")
        return given

    with patch.object(Loader, "batch", batch):
        main(arguments)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), sys.argv[2:])
    worker = (__file__, sys.argv[1])
    sys.exit(guarded(lambda: run_ranks(load(sys.argv[3:]), int(sys.argv[2]), time.monotonic(), worker)))
