"""What ranks do in test_run_ranks.py."""

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.pretrain import pretrain


def train(overrides: list[str]) -> int:
    return pretrain(load(overrides))


def refusal(overrides: list[str]) -> str:
    try:
        train(overrides)
    except ConfigError as error:
        return str(error)
    return ""
