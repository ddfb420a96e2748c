"""Cells of the matrix, each a layout and the tiny run that it is tried on; and layouts that are refused.

The one-process run that judges a cell depends on the model alone: the global batch holds the same samples however it
is cut, and dropout is drawn from their numbers.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from gptlite.config import load
from gptlite.config.batch import check_world
from gptlite.errors import ConfigError

GLOBAL_BATCH = 48
STEPS = 5
QUICK_STEPS = 2  # of the cells of every run: the second has been through an update and its state
# Eight layers, so that zbv has its eight stages on four ranks (half of them where the pipeline is short); eight heads
# for eight tensor ranks. The learning rate is the one of a warm-up: at its peak in the first step, Adam makes 5e-5 of a
# gradient out of rounding. Clipping and weight decay are strong enough to be seen beside the tolerances.
BASE = f"""
data=synthetic data.vocab_size=37 data.num_tokens=20000 data.global_batch_size={GLOBAL_BATCH} trainer.max_steps=1000
model=gpt-lite model.num_layers=8 model.num_heads=8 model.d_model=32 model.sequence_length=16 model.dropout=0.1
schedule=constant schedule.warmup_steps=9 optimizer.lr=1e-3 optimizer.clip_norm=0.5 optimizer.weight_decay=10
run.dir=unused run.name=parity
""".split()
# 37 tokens are padded to 64 rows, the last ranks' all padding, or kept, and cut unevenly.
VOCABULARIES = {"padded": 64, "uneven": 1}


@dataclass(frozen=True)
class Cell:
    """One layout and the run it is tried on."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    schedule: str = "none"  # none: no pipeline
    sequence: bool = False
    tied: bool = True
    vocabulary: str = "padded"
    accumulation: int = 1
    checkpointing: str = "none"
    precision: str = "fp32"
    replicate: int = 1
    context: int = 1
    offload: str = "none"
    shared: tuple[str, ...] = ()  # overrides that the reference has too
    more: tuple[str, ...] = ()  # overrides that change no number

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def id(self) -> str:
        words = [f"tp{self.tensor}{'-sp' if self.sequence else ''}-pp{self.pipeline}"]
        words += [self.schedule] if self.pipeline > 1 else []
        words += [f"dp{self.data}" + (f"x{self.replicate}" if self.replicate > 1 else ""), f"zero{self.zero}"]
        words.insert(1, f"cp{self.context}") if self.context > 1 else None
        words += [f"acc{self.accumulation}", "tied" if self.tied else "untied", self.vocabulary]
        words += [f"ac_{self.checkpointing}"] if self.checkpointing != "none" else []
        words += [self.precision] if self.precision != "fp32" else []
        words += [self.offload] if self.offload != "none" else []
        words += [each.split(".")[-1].replace("=", "_") for each in self.shared + self.more]
        return "-".join(words)

    @property
    def has_twin(self) -> bool:
        """Whether the same layout without offload gives the same bits: docs/offload.md. fp16's kinds are not tried."""
        exact = self.precision == "fp32" or (self.precision == "bf16" and self.data * self.context > 1)
        return self.offload != "none" and exact

    @property
    def layers(self) -> int:
        return 8 if self.pipeline > 2 else 4

    @property
    def cost(self) -> float:
        """About how long it takes, in blocks of a rank run once through."""
        halves = 2 if self.schedule in ("zero_bubble", "zbv") and self.checkpointing != "none" else 1
        each = {"none": 1, "full": 2, "selective": 4}[self.checkpointing] * halves * (1 + self.tensor / 8)
        return 4 + self.layers / self.pipeline * self.accumulation * each

    @property
    def model(self) -> tuple[str, ...]:
        """The overrides that the reference shares."""
        return (
            f"model.num_layers={self.layers}",
            f"model.tied_embeddings={str(self.tied).lower()}",
            f"model.vocab_multiple={VOCABULARIES[self.vocabulary]}",
            *self.shared,
        )

    def overrides(self) -> list[str]:
        """Of train.py."""
        layout = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "data": self.data,
            "dp_replicate": self.replicate,
            "context": self.context,
            "zero": self.zero,
            "sequence": str(self.sequence).lower(),
            "activation_checkpointing": self.checkpointing,
        }
        if self.pipeline > 1:
            layout["schedule"] = self.schedule
        if self.offload != "none":
            layout |= {"offload": self.offload, "offload_buffer_mib": 1}
        if self.offload == "nvme":
            layout["offload_path"] = tempfile.gettempdir()
        micro = GLOBAL_BATCH // (self.data * self.accumulation)
        return [
            *BASE,
            *self.model,
            f"precision={self.precision}",
            f"data.micro_batch_size={micro}",
            *(f"parallelism.{key}={value}" for key, value in layout.items()),
            *self.more,
        ]


def reference_of(cell: Cell, precision: str) -> list[str]:
    """The overrides of the one-process run that a cell is judged by."""
    return [*BASE, *cell.model, f"precision={precision}", f"data.micro_batch_size={GLOBAL_BATCH}"]


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
