"""Scoring and generation of texts, given as token ids, on one rank or many. Independent of lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gptlite.models.capabilities import Sampling, TextGeneration, required
from gptlite.models.model import Model
from gptlite.models.scores import scores
from gptlite.ops.inputs import IGNORE, Inputs
from gptlite.parallelism.axes import CONTEXT
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.progress import Log, Progress
from gptlite.tokenizers.base import StreamDecoder, Tokenizer

PROGRESS_SECONDS = 5.0


class Scored(NamedTuple):
    """Tokens of which the last `count` are scored, each conditioned on all tokens before it."""

    tokens: list[int]
    count: int


class Prompt(NamedTuple):
    """Tokens to continue, by at most `max_tokens` tokens or until one of the strings `until` is generated."""

    tokens: list[int]
    max_tokens: int
    until: tuple[str, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Scorer:
    """Scores and continues texts with a model. All ranks call its methods, with the same arguments.

    `batch_size` sequences are scored at a time on each data-parallel rank.
    """

    model: Model
    runner: StageRunner
    tokenizer: Tokenizer
    batch_size: int
    log: Log

    def score(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return for each request the sum of the log probabilities of the scored tokens, and True if every scored token
        is the most likely one.

        Sequences of similar lengths share a batch, the longest first. They are padded on the right, which does not
        change the results of causal attention.
        """
        mesh = self.runner.mesh
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
        ranks, size = mesh.data_size, self.batch_size * mesh.data_size
        counts = self.runner.has_last and mesh.is_first("uncut") and mesh.coordinate(CONTEXT) == 0
        totals = torch.zeros(len(requests), 2, dtype=torch.float64, device=mesh.device)
        progress = Progress("scoring", len(requests), self.log, PROGRESS_SECONDS, unit="requests")
        with self.runner.reading(whole_sequence=True):
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                mine = batch[mesh.data_rank :: ranks]
                # All ranks run the same number of batches, since ZeRO gathers parameters in each batch.
                out = self._batch([requests[index] for index in mine or batch[:1]])
                if out is not None and mine and counts:
                    totals[torch.tensor(mine, device=mesh.device)] = out
                progress.add(len(batch))
        return [(nats, wrong == 0) for nats, wrong in all_reduce(totals, mesh).tolist()]

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the text that continues each prompt, up to the first string of its `until` or the end of the
        document."""
        progress = Progress("generating", len(prompts), self.log, PROGRESS_SECONDS, unit="requests")
        texts = []
        for prompt in prompts:
            texts.append(self._continued(prompt))
            progress.add(1)
        return texts

    def _batch(self, requests: Sequence[Scored]) -> Tensor | None:
        """Return float64 [B, 2] on the ranks with the last part: the sum of the log probabilities, and the number of
        tokens that are not the most likely ones."""
        length = max(len(each.tokens) for each in requests) - 1
        tokens = torch.zeros(len(requests), length, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE)
        for row, (given, count) in enumerate(requests):
            end = len(given) - 1
            tokens[row, :end] = torch.tensor(given[:-1])
            targets[row, end - count : end] = torch.tensor(given[-count:])
        tokens, targets = tokens.to(self.runner.mesh.device), targets.to(self.runner.mesh.device)
        stages = self.runner.num_stages
        shapes = self.model.boundaries(tokens, length, stages) if stages > 1 else []
        out = self.runner.run(tokens, partial(_scores, self.model, Inputs(targets)), shapes, self.model.dtype)
        if out is None:
            return None
        log_p, likely = out.double().unbind(-1)
        return torch.stack([log_p.sum(1), ((targets != IGNORE) & (likely == 0)).sum(1).double()], dim=1)

    def _continued(self, prompt: Prompt) -> str:
        decoder, text = StreamDecoder(self.tokenizer), ""
        tokens = required(self.model.spec, TextGeneration, "tasks").generate(
            self.runner,
            prompt.tokens,
            prompt.max_tokens,
            prompt.sampling,
            stop=self.tokenizer.eod,
            cache=True,
        )
        space = self.tokenizer.adds_space  # before a text, which decoding removes, as transformers does
        for token in tokens:
            text += decoder.push(token)
            if space and text:
                text, space = text.removeprefix(" "), False
            if any(end in text for end in prompt.until):  # all ranks have the same tokens, so all of them stop here
                break
        text += decoder.flush()
        return text[: min((text.find(end) for end in prompt.until if end in text), default=len(text))]


def _scores(model: Model, inputs: Inputs, index: int, part: nn.Module, x: Tensor) -> Tensor:
    return scores(model, part, x, inputs)
