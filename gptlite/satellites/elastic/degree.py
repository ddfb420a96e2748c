"""Largest layout of an elastic run on the ranks at hand."""

from gptlite.config.batch import check_world
from gptlite.config.schema import Config
from gptlite.errors import ConfigError


def largest(config: Config, world: int) -> int:
    """Return the number of ranks of the largest legal layout on at most `world` ranks; 0 if there is none."""
    for ranks in range(world, 0, -1):
        try:
            check_world(config, ranks)
            return ranks
        except ConfigError:
            continue
    return 0
