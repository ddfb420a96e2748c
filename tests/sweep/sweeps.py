"""What the tests of sweeps share."""

import json
from collections.abc import Callable
from pathlib import Path

from distributed.cells.commands import TRAIN, Run

from gptlite.satellites.sweep.folder import Record

# A run of seconds: no text to prepare, nothing said at its end.
SMALL = (
    "data=synthetic",
    "data.vocab_size=64",
    "data.global_batch_size=4",
    "data.micro_batch_size=2",
    "model=gpt-lite",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.d_model=32",
    "model.sequence_length=32",
    "schedule=constant",
    "schedule.warmup_steps=1",
    "trainer.log_interval=1",
    "trainer.eval_samples=4",
    "trainer.sample_tokens=0",
    "trainer.max_steps=3",
    "precision=fp32",
    "ops=reference",
)
# Three cells, of which the second takes long enough to be stopped in.
LONG_SECOND = ("-m", *SMALL, "trainer.max_steps=2,1000,3", "checkpoint.interval=20", "trainer.log_interval=100")


def records(folder: Path) -> list[Record]:
    """Those in sweep.json."""
    content = json.loads((folder / "sweep.json").read_text())
    assert content["version"] == 1
    return [Record(**each) for each in content["cells"]]


def statuses(folder: Path) -> list[str]:
    """In the order of the cells."""
    return [record.status for record in records(folder)]


def begun(output: str) -> list[str]:
    """The names of the cells that ran, in the order they began."""
    lines = [line for line in output.splitlines() if line.startswith("cell ") and " of " in line.partition(":")[0]]
    return [line.partition(": ")[2] for line in lines]


def stopped_in_second(start: Callable[..., Run], folder: Path, *overrides: str) -> Run:
    """The sweep of LONG_SECOND, started, its second cell training and with a checkpoint."""
    run = start(TRAIN, *LONG_SECOND, f"hydra.sweep.dir={folder}", *overrides)
    run.until(folder / "1-max_steps1000" / "checkpoints" / "latest", timeout=150)
    return run
