"""Command lines with subcommands: which one, on which paths, with which options. None is loaded but the one.

A subcommand's module has its help as docstring, `Options` (a dataclass of its key=value options) and
`run(paths, options)`, which returns the exit code.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import NoReturn

from gptlite.config import parse_arguments
from gptlite.errors import ConfigError, did_you_mean
from gptlite.invocation import localized
from gptlite.tool import run_tool


@dataclass(frozen=True)
class Subcommand:
    """Its module, dotted, and the paths it takes; `more`: any number of the last one."""

    module: str
    paths: tuple[str, ...]
    more: bool = False

    @property
    def usage(self) -> str:
        """`A B`, or `PATH ...`."""
        return " ".join(self.paths) + " ..." * self.more


def run_subcommand(subcommands: Mapping[str, Subcommand], usage: str) -> NoReturn:
    """Runs the command line and exits; without arguments or with --help it prints `usage`."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(localized(usage))
        sys.exit(0)
    try:
        if name not in subcommands:
            raise ConfigError(f"{name} is not one of {', '.join(subcommands)}{did_you_mean(name, subcommands)}")
        module = import_module(subcommands[name].module)
        if {"-h", "--help"} & set(rest):
            print(localized(module.__doc__ or "").strip())
            sys.exit(0)
        paths, options = separate(name, subcommands[name], rest, [item.name for item in fields(module.Options)])
        parse_arguments(module.Options, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = options  # run_tool reads them
    run_tool(lambda typed: module.run(paths, typed), module.Options, None)


def separate(name: str, wanted: Subcommand, arguments: list[str], keys: list[str]) -> tuple[list[str], list[str]]:
    """Paths and key=value options. Raises ConfigError where the number of paths is not the subcommand's."""
    # A sweep's folders are called lr=0.1: only what reads as one of our keys is an option where a path has that name.
    options = [each for each in arguments if re.match(r"[A-Za-z_]+=", each) or each.startswith("-")]
    paths = [each for each in arguments if each not in options]
    for each in options:
        if each.startswith("-"):
            raise ConfigError(f"{each}: options are key=value{'; ' * bool(keys)}{', '.join(keys)}")
        if not keys:
            raise ConfigError(f"{each}: {name} takes no options, only {wanted.usage}; a path with = starts with ./")
    short = len(paths) < len(wanted.paths)
    if short or (len(paths) > len(wanted.paths) and not wanted.more):
        given = f"{len(paths)} path{'s' * (len(paths) != 1)} given"
        raise ConfigError(f"{name} takes {wanted.usage}; {given}{': ' * bool(paths)}{' '.join(paths)}")
    return paths, options
