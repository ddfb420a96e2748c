"""The command line: which subcommand, on which paths, with which options. A module each, none loaded but the one.

A subcommand's module has its help as docstring, `Options` (a dataclass of its key=value options) and
`run(paths, options)`, which returns the exit code.
"""

import re
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, NoReturn

from gptlite.config import parse_arguments
from gptlite.errors import ConfigError, did_you_mean
from gptlite.tool import run_tool

EXIT_FAILED = 1


@dataclass(frozen=True)
class Subcommand:
    """Its module in this package, and the paths it takes; `more`: any number of the last one."""

    module: str
    paths: tuple[str, ...]
    more: bool = False

    @property
    def usage(self) -> str:
        """`A B`, or `PATH ...`."""
        return " ".join(self.paths) + " ..." * self.more


SUBCOMMANDS = {
    "ls": Subcommand("ls", ("PATH",), more=True),
    "inspect": Subcommand("inspect", ("RUN_OR_STEP",)),
    "verify": Subcommand("verify", ("RUN_OR_STEP",), more=True),
    "diff": Subcommand("diff", ("A", "B")),
    "prune": Subcommand("prune", ("RUN",)),
    "export": Subcommand("export", ("RUN_OR_STEP", "TARGET")),
    "import": Subcommand("import_", ("HF_FOLDER", "RUN_DIR")),
}

HELP = """\
Checkpoints of runs: what there is, whether it is whole, how two differ; tidying up, and Hugging Face's format.

  ls PATH ...                  the checkpoints of runs, in a table
  inspect RUN_OR_STEP          what is in one: step, layout, sizes, configuration, tensors
  verify RUN_OR_STEP ...       reads every byte again and compares
  diff A B                     what differs between two runs, checkpoints or config.yaml files
  prune RUN keep=K             removes all but the newest K
  export RUN_OR_STEP TARGET    writes the weights as a Hugging Face GPT-2 folder
  import HF_FOLDER RUN_DIR     makes a checkpoint of a Hugging Face GPT-2 folder

A RUN is a run's folder or its checkpoints folder, a STEP a folder step-00000100. Options are key=value;
`gptlite-checkpoint SUBCOMMAND --help` lists them (from a checkout: python tools/checkpoint.py SUBCOMMAND --help).
Exit codes: 0 fine, 1 damaged or different, 2 refused."""


def main() -> NoReturn:
    """Runs the command line and exits."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP)
        sys.exit(0)
    try:
        if name not in SUBCOMMANDS:
            raise ConfigError(f"{name} is not one of {', '.join(SUBCOMMANDS)}{did_you_mean(name, SUBCOMMANDS)}")
        module = import_module(f"gptlite.checkpoint_tool.{SUBCOMMANDS[name].module}")
        if {"-h", "--help"} & set(rest):
            print((module.__doc__ or "").strip())
            sys.exit(0)
        paths, options = separate(name, rest, [item.name for item in fields(module.Options)])
        parse_arguments(module.Options, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = options  # run_tool reads them
    run_tool(lambda typed: guarded(module, paths, typed), module.Options, None)


def separate(name: str, arguments: list[str], keys: list[str]) -> tuple[list[str], list[str]]:
    """Paths and key=value options. Raises ConfigError where the number of paths is not the subcommand's."""
    wanted = SUBCOMMANDS[name]
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


def guarded(module: Any, paths: list[str], options: Any) -> int:
    """Runs a subcommand; what the disk refuses is one line too."""
    try:
        return module.run(paths, options)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
