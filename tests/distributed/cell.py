"""One cell of the matrix: a layout, the tiny run that it is tried on, and the one-process run that judges it.

The reference depends on the model alone: the global batch holds the same samples however it is cut, and dropout is
drawn from their numbers.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

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
        words += [self.schedule] * (self.pipeline > 1)
        words += [f"dp{self.data}" + (f"x{self.replicate}" if self.replicate > 1 else ""), f"zero{self.zero}"]
        words.insert(1, f"cp{self.context}") if self.context > 1 else None
        words += [f"acc{self.accumulation}", "tied" if self.tied else "untied", self.vocabulary]
        words += [f"ac_{self.checkpointing}"] * (self.checkpointing != "none")
        words += [self.precision] * (self.precision != "fp32")
        words += [self.offload] * (self.offload != "none")
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
