"""Adapter from a gptlite model to lm-eval's `LM` interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec
from gptlite.models.capabilities import Sampling, TextGeneration, required
from gptlite.satellites.harness.ranks import SharedScorer
from gptlite.satellites.harness.scorer import Prompt, Scored
from gptlite.tokenizers.base import Tokenizer

MAX_TOKENS = 256  # limit of a generated text if the task sets none, as in lm-eval's HFLM
# Names that tasks use for the limit. The first one that is set is used.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class GptliteLM(TemplateLM):
    """LM of lm-eval that wraps a model. As in lm-eval's HFLM, requests that exceed the model's context are truncated on
    the left, and an empty context is replaced by the token that begins a text: BOS for imported weights whose tokenizer
    has one, and the end-of-document token for a model that gptlite trained, whose documents begin after it."""

    def __init__(self, scorer: SharedScorer, spec: BaseSpec, tokenizer: Tokenizer, max_length: int) -> None:
        super().__init__()
        self._scorer, self._spec, self._tokens, self.max_length = scorer, spec, tokenizer, max_length

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends documents."""
        return self._tokens.eod

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text, for log likelihoods without a context."""
        return self._tokens.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Return the token ids of a text. No special tokens are added."""
        return self._tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        scored = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"tasks: an answer has {len(continuation)} tokens, more than the model's context of "
                    f"{self.max_length}; choose other tasks"
                )
            scored.append(Scored((context + continuation)[-self.max_length - 1 :], len(continuation)))
        answers = self._scorer.score(scored)
        for (texts, *_), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each text. Texts are split into windows of at most the context length, so that
        every token is scored once."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            given = (self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)
            for context, tokens in map(make_disjoint_window, get_rolling_token_windows(*given)):
                windows.append((None, context, tokens))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += nats
        for request, nats in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, nats)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, generated greedily unless the task requests sampling."""
        required(self._spec, TextGeneration, "tasks: one of the tasks generates text")
        texts = self._scorer.generate(
            [self._prompt(each.args[0], each.args[1], seed) for seed, each in enumerate(requests)]
        )
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _prompt(self, context: str, options: Mapping[str, Any], seed: int) -> Prompt:
        most = next((int(options[name]) for name in LIMITS if options.get(name) is not None), MAX_TOKENS)
        # Leave room for the generated text, as in HFLM. If the text alone exceeds the context, generation drops the
        # older half of the context whenever it is full.
        room = self.max_length - most if most < self.max_length else self.max_length // 2 or 1
        until = options.get("until") or []
        ends = tuple(end for end in ([until] if isinstance(until, str) else until) if end)
        return Prompt(self.tok_encode(context)[-room:] or [self.prefix_token_id], most, ends, _sampling(options, seed))


def _sampling(options: Mapping[str, Any], seed: int) -> Sampling:
    temperature = float(options.get("temperature") or 0.0)
    if not options.get("do_sample", temperature > 0) or temperature == 0:
        return Sampling(temperature=0.0)
    top_k, top_p = int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
    # Seeds differ, since a task may request several texts for one context.
    return Sampling(temperature, top_k, top_p, seed)
