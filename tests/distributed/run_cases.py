"""What ranks do in test_run_ranks.py."""

from gptlite.config import load
from gptlite.pretrain import pretrain


def train(overrides: list[str]) -> int:
    return pretrain(load(overrides)).exit_code
