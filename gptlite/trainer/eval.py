"""Evaluation on held-out data."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gptlite.data.batch_loader import Batch, BatchLoader
from gptlite.models.metrics import metric_values
from gptlite.models.model import Model
from gptlite.ops.inputs import Inputs
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.progress import Progress

PROGRESS_SECONDS = 5.0  # interval between progress lines


@dataclass(frozen=True)
class Evaluation:
    """Sums over the evaluated tokens. `text_bytes` is the UTF-8 size of the targets; None or 0 if they are not text.

    For a blend, `parts` maps each data set's name to its evaluation, and this evaluation is their sum. `metrics` maps
    the names in BaseSpec.metrics to sums.
    """

    nats: float
    tokens: int
    text_bytes: int | None
    parts: dict[str, "Evaluation"] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float]:
        """Means of `metrics` per target."""
        return {name: total / self.tokens for name, total in self.metrics.items()}

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); inf on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf  # math.exp raises above 709

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte, which are comparable across tokenizers, unlike nats per token. None if not text."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None


def evaluate_sets(
    model: Model,
    runner: StageRunner,
    loader: BatchLoader,
    limit: int | None,
    interrupted: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] = lambda _: None,
) -> Evaluation | None:
    """Evaluate up to `limit` sequences of each data set, or all. Returns None if `interrupted` returns True.

    An evaluation that takes longer than a few seconds logs its progress.
    """
    parts = {}
    total = sum(loader.num_validation_batches(limit, name) for name in loader.validation_sets)
    progress = Progress("evaluating", total, log, PROGRESS_SECONDS, unit="batches")
    for name in loader.validation_sets:
        batches, text_bytes = loader.validation_batches(limit, name), loader.validation_bytes(limit, name)
        if (result := evaluate(model, runner, batches, text_bytes, interrupted, progress)) is None:
            return None
        parts[name] = result
    if len(parts) == 1:
        return next(iter(parts.values()))
    each = list(parts.values())
    text_bytes = sum(one.text_bytes or 0 for one in each)
    metrics = {name: math.fsum(one.metrics[name] for one in each) for name in each[0].metrics}
    return Evaluation(sum(one.nats for one in each), sum(one.tokens for one in each), text_bytes, parts, metrics)


def evaluate(
    model: Model,
    runner: StageRunner,
    batches: Iterable[Batch],
    text_bytes: int | None,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Evaluation | None:
    """Evaluate the batches of all ranks without dropout. Returns None if `interrupted` returns True. Collective."""
    mesh = runner.mesh
    # All tensor-parallel ranks compute the same loss, so only the first adds its loss to the sum.
    counts = mesh.is_first("uncut")
    names = model.spec.metrics
    seen: torch.Size | None = None
    shapes: list[tuple[int, ...]] = []  # shape of each stage's input, for batches of shape `seen`
    # Sums stay on the device, so batches do not synchronise with the host. fp64 keeps long sums accurate.
    sums = torch.zeros(2 + len(names), dtype=torch.float64, device=mesh.device)
    with runner.reading():
        for batch in batches:
            if interrupted():  # collective, so every rank calls it before every batch
                return None
            if runner.num_stages > 1 and (batch.tokens.shape != seen):
                seen = batch.tokens.shape
                shapes = model.boundaries(batch.tokens, runner.slice_length(batch.length), runner.num_stages)
            batch_metrics: dict[str, Any] = {}
            inputs = Inputs(batch.targets, documents=batch.documents, metrics=batch_metrics)
            loss = runner.run(batch.tokens, partial(_forward, model, inputs), shapes, model.dtype)
            if loss is not None and counts and batch.counted:
                values = torch.stack([loss.double(), model.count(batch.targets).double()])
                sums += (
                    torch.cat([values, metric_values(model.spec, batch_metrics, values.device)]) if names else values
                )
            if progress is not None:
                progress.add(1)
    nats, tokens, *metrics = all_reduce(sums, mesh).tolist()
    return Evaluation(nats, int(tokens), text_bytes, metrics=dict(zip(names, metrics, strict=True)))


def _forward(model: Model, inputs: Inputs, index: int, part: torch.nn.Module, x: Any) -> torch.Tensor:
    return model.forward(part, x, inputs)
