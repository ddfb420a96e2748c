"""Text generation by sampling, one token at a time."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from gptlite.models.capabilities import Sampling
from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.model import GPT
from gptlite.parallelism.stage_runner import StageRunner


def generate(
    model: GPT | StageRunner,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling,
    *,
    stop: int | None = None,
    cache: bool = True,
) -> Iterator[int]:
    """Yield up to `max_tokens` tokens that continue `prompt`, ending before the first `stop`.

    When the context exceeds the model's sequence length, its older half is dropped. This happens with and without the
    KV cache, so the two give the same tokens, up to rounding. If the model is sharded, all ranks call this function and
    get the same tokens. Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token, such as the end-of-document token")
    runner = model if isinstance(model, StageRunner) else StageRunner([model])
    limit = _first(runner).config.sequence_length
    generator = torch.Generator().manual_seed(sampling.seed)  # on the CPU, for the same draws on any device
    context, unread, caches = prompt[-limit:], prompt[-limit:], _caches(runner) if cache else None
    for _ in range(max_tokens):
        logits = _logits(runner, unread if caches else context, caches)
        token = runner.from_last(partial(_draw, logits, sampling, generator))
        if token == stop:
            return
        yield token
        context = [*context, token]
        unread = [token]
        if len(context) > limit:
            context = context[limit // 2 + 1 :]
            # All positions have changed, so cached keys and values are invalid.
            unread, caches = context, _caches(runner) if cache else None


def _logits(runner: StageRunner, context: list[int], caches: list[list[LayerCache]] | None) -> Tensor:
    """Return logits [V] of the next token on the rank with the last part; an empty tensor on all others."""
    tokens = torch.tensor([context], device=runner.mesh.device)
    shape, dtype = (1, len(context), _first(runner).config.stage_width), _first(runner).compute_dtype
    shapes = [shape] * runner.num_stages

    def call(index: int, part: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(part, GPT)
        return part(x, None, caches=caches[index] if caches else None)

    with runner.reading(whole_sequence=True):
        out = runner.run(tokens, call, shapes, dtype)
    return torch.empty(0) if out is None else out[0].cpu()


def _first(runner: StageRunner) -> GPT:
    part = runner.parts[0]
    assert isinstance(part, GPT)
    return part


def _caches(runner: StageRunner) -> list[list[LayerCache]]:
    """Return a KV cache for each layer of each of this rank's parts."""
    limit = _first(runner).config.sequence_length
    return [[LayerCache(limit) for _ in part.layers] for part in runner.parts if isinstance(part, GPT)]


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from logits [V]."""
    if sampling.temperature == 0:
        return int(logits.argmax())  # the limit as the temperature approaches 0
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    p, order = logits.softmax(-1).sort(descending=True)
    if sampling.top_p < 1:
        # Nucleus sampling (arXiv:1904.09751): the smallest set of tokens whose probability reaches top_p.
        p = p.masked_fill(p.cumsum(-1) - p >= sampling.top_p, 0.0)  # the token that reaches top_p stays
    return int(order[torch.multinomial(p, 1, generator=generator)])
