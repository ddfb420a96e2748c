"""A model that shares nothing with the GPT: a causal convolution over characters, with buffers and no tensor plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.config import load
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec
from gptlite.ops.inputs import Inputs
from gptlite.ops.select import Ops


@dataclass
class ConvConfig(ModelConfig):
    """As many causal convolutions as `depth`."""

    channels: int = 24
    depth: int = 3
    kernel: int = 3
    symbols: int | None = None


class Convolution(nn.Module):
    """y + gelu(conv(y)); y [B, C, S]."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.kernel = config.kernel
        self.filter = nn.Conv1d(config.channels, config.channels, config.kernel)
        self.register_buffer("gain", torch.tensor(0.5))

    def forward(self, y: Tensor) -> Tensor:
        return y + self.gain * F.gelu(self.filter(F.pad(y, (self.kernel - 1, 0))))


class ConvNet(nn.Module):
    """Symbols [B, S] to logits [B, S, V], by a signature of its own."""

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        assert config.symbols is not None
        self.table: nn.Module | None = nn.Embedding(config.symbols, config.channels)
        self.stack = nn.ModuleDict({f"c{i}": Convolution(config) for i in range(config.depth)})
        self.out: nn.Module | None = nn.Linear(config.channels, config.symbols)
        self.register_buffer("mean", torch.linspace(-0.1, 0.1, config.channels))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, *, symbols: Tensor | None = None, between: Tensor | None = None) -> Tensor:
        y = self.table(symbols).transpose(1, 2) if self.table is not None else between
        for block in self.stack.values():
            y = block(y)
        return y if self.out is None else self.out(y.transpose(1, 2) - self.mean * self.scratch[0])


class ConvSpec(ModelSpec[ConvConfig]):
    name = "conv"
    schema = ConvConfig
    blocks_key = "depth"
    positive = ("channels", "depth", "kernel", "symbols")

    def num_blocks(self, config: ConvConfig) -> int:
        return config.depth

    def vocab_size(self, config: ConvConfig) -> int | None:
        return config.symbols

    def with_vocabulary(self, config: ConvConfig, vocab_size: int) -> ConvConfig:
        return config if config.symbols else ConvConfig(config.channels, config.depth, config.kernel, vocab_size)

    def build(self, config: ConvConfig, ops: Ops, seed: int) -> nn.Module:
        return ConvNet(config)

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        return {int(name[1:]): block for name, block in part.stack.items()}  # type: ignore[operator,union-attr]

    def forward(self, part: nn.Module, x: Tensor, inputs: Inputs) -> Tensor:
        out = part(symbols=x) if part.table is not None else part(between=x)
        if part.out is None:
            return out
        return F.cross_entropy(out.flatten(0, 1).float(), inputs.targets.flatten(), reduction="sum", ignore_index=-100)

    def keep(self, part: Any, config: ConvConfig, blocks: range) -> None:
        if blocks.start > 0:
            part.table = None
        if blocks.stop < config.depth:
            part.out = None
        for number in set(range(config.depth)) - set(blocks):
            del part.stack[f"c{number}"]

    def activations(self, config: ConvConfig, batch: int, length: int) -> tuple[int, ...]:
        return batch, config.channels, length


register_model(ConvSpec())

SYNTHETIC = ("data=synthetic", "data.num_tokens=4000", "data.vocab_size=61")
RUN = """
model=conv data.sequence_length=32 data.global_batch_size=8
data.micro_batch_size=2 optimizer.lr=1e-2 schedule=constant schedule.warmup_steps=0 precision=fp32 run.name=conv
trainer.log_interval=1 trainer.max_steps=6 trainer.eval_interval=3 trainer.eval_samples=16 checkpoint.interval=3
""".split()


def config_of(*overrides: str):
    """A run of it."""
    data = () if any(each.startswith("data=") for each in overrides) else SYNTHETIC
    return load([*data, *RUN, *overrides])


def train(folder: str, *overrides: str) -> int:
    """On every rank of a world."""
    from run_files import without_plots  # not above: tests copy this file, as a plugin in a folder of its own

    from gptlite.start.pretrain import pretrain

    with without_plots():
        return pretrain(config_of(f"run.dir={folder}", *overrides)).exit_code
