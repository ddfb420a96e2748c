"""What ranks do in test_lm.py."""

from typing import Any

from gptlite.config.compose import load_layout
from gptlite.satellites.harness.ranks import SharedScorer
from gptlite.satellites.harness.scorer import Scorer
from gptlite.trainer.restore import restore
from harness.models import PAIRS, PROMPTS, TEXTS, requests


def answers(step: str, layout: str) -> list[Any] | None:
    """Rank 0's answers, through lm-eval's interface."""
    found = restore(step, "fp32", layout=load_layout([layout]))
    scorer = Scorer(found.model, found.runner, found.tokenizer, 2, print)
    shared = SharedScorer(scorer, found.runner.mesh)
    with shared.serving() as main:
        if not main:
            return None
        from gptlite.satellites.harness.lm import GptliteLM

        lm = GptliteLM(shared, found.model.spec, found.tokenizer, 32)
        pairs = lm.loglikelihood(requests(PAIRS), disable_tqdm=True)
        return [pairs, lm.loglikelihood_rolling(requests(TEXTS)), lm.generate_until(requests(PROMPTS))]
