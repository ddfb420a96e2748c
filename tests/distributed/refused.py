"""Layouts that no ranks can run, and what their refusals must name."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.cell import BASE
from gptlite.config import load
from gptlite.config.batch import check_world
from gptlite.errors import ConfigError


@dataclass(frozen=True)
class Refused:
    """Overrides of train.py that no number of ranks can run, or not `world`, and what the refusal must name."""

    overrides: str
    names: str
    world: int | None = None

    def reason(self) -> str:
        """The line that train.py prints. Fails if it would run."""
        try:
            config = load([*BASE, "precision=fp32", *self.overrides.split()])
            if self.world is not None:
                check_world(config, self.world)
        except ConfigError as error:
            return str(error)
        raise AssertionError(f"{self.overrides} is not refused")

    def cause(self) -> str:
        """The line without the values that it proposes."""
        return self.reason().split("; ")[0]


P = "parallelism."
REFUSED = [
    Refused(f"{P}tensor=3", "model.num_heads=8"),
    Refused(f"{P}tensor=4 model.d_ff=102", "model.d_ff=102"),
    Refused(f"{P}tensor=8 data.vocab_size=5 model.vocab_size=5 model.vocab_multiple=1", "5 rows"),
    Refused(f"{P}sequence=true", "parallelism.sequence=true"),
    Refused(f"{P}tensor=8 {P}sequence=true data.sequence_length=12", "data.sequence_length=12"),
    Refused(f"{P}pipeline=9 {P}schedule=gpipe", "model.num_layers=8"),
    Refused(f"{P}pipeline=8 {P}schedule=zbv", "16 stages"),
    Refused(f"{P}pipeline=4 {P}schedule=1f1b data.micro_batch_size=16", "needs at least 4 micro-batches"),
    Refused(f"{P}pipeline=3 {P}schedule=interleaved_1f1b data.micro_batch_size=3 {P}data=1", "in equal rounds of 3"),
    Refused(f"{P}pipeline=3 {P}schedule=zero_bubble data.micro_batch_size=3 {P}data=1", "in equal rounds of 3"),
    Refused(f"{P}pipeline=2 {P}schedule=gpipe {P}virtual_stages=2", "parallelism.virtual_stages=2"),
    Refused(f"{P}pipeline=2 {P}schedule=zbv {P}virtual_stages=1", "parallelism.virtual_stages=1"),
    Refused(f"{P}pipeline=2 {P}schedule=zbv trainer.compile=true", "trainer.compile=true"),
    Refused(f"{P}pipeline=2 {P}schedule=dualpipe", "parallelism.schedule=dualpipe"),
    Refused(f"{P}zero=4", "parallelism.zero=4"),
    Refused(f"{P}data=4 {P}zero=3 {P}dp_replicate=3", "parallelism.dp_replicate=3"),
    Refused(f"{P}data=4 {P}dp_replicate=2", "parallelism.zero=0"),
    Refused(f"{P}data=5", "data.global_batch_size=48"),
    Refused(f"{P}data=2 {P}tensor=2 data.micro_batch_size=8", "world size 8", world=8),
    Refused(f"{P}tensor=2 {P}pipeline=2", "world size 6", world=6),
    Refused(f"{P}context=3", "data.sequence_length=16"),
    Refused(f"{P}context=4 {P}tensor=8 {P}sequence=true", "data.sequence_length=16 / parallelism.context=4 = 4"),
]
