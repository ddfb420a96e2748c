"""Private names of Hydra. No other file uses any."""

from argparse import ArgumentParser

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override


def argument_parser() -> ArgumentParser:
    """Return the parser of Hydra's own flags."""
    return get_args_parser()


def combinations_of(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each job that Hydra's own sweeper starts, in order."""
    (combinations,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return combinations
