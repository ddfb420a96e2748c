"""The loss on held-out text."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from gptlite.data.loader import IGNORE, Batch
from gptlite.model.gpt import GPT


@dataclass(frozen=True)
class Evaluation:
    """Sums over what was read. `text_bytes` are the UTF-8 bytes the predicted tokens stand for; None for no text."""

    nats: float
    tokens: int
    text_bytes: int | None

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte: comparable across tokenizers, as nats per token are not."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None


def evaluate(
    part: GPT, batches: Iterable[Batch], text_bytes: int | None, interrupted: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """The loss over all batches, dropout off; None if `interrupted` came true meanwhile."""
    was_training = part.training
    part.eval()
    try:
        nats, tokens = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                if interrupted():
                    return None
                nats += part(batch.tokens, batch.targets).item()
                tokens += int((batch.targets != IGNORE).sum())
        return Evaluation(nats, tokens, text_bytes)
    finally:
        part.train(was_training)
