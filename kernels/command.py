"""The command line `gptlite kernels`: which subcommand, with which options. A module each, none loaded but the one.

A subcommand's module has its help as docstring, `Options` (a dataclass of its key=value options) and `run(options)`,
which returns the exit code.
"""

import sys
from importlib import import_module
from typing import NoReturn

from gptlite.errors import ConfigError, did_you_mean
from gptlite.invocation import localized
from gptlite.tool import run_tool

SUBCOMMANDS = {"build": "prebuild", "info": "info", "test": "check", "bench": "bench"}

HELP = """\
The fused kernels of this machine. They compile by themselves at first use; this says how it went.

  build    compiles them now, or says that they are compiled
  info     compilers, cache, library, and which path each op takes here
  test     every op against torch's own in float64
  bench    every op against torch's, for speed

Options are key=value; `gptlite kernels SUBCOMMAND --help` lists them.
Exit codes: 0 fine, 1 failed, 2 refused."""


def main() -> NoReturn:
    """Runs the command line and exits."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(localized(HELP))
        sys.exit(0)
    if name not in SUBCOMMANDS:
        error = ConfigError(f"{name} is not one of {', '.join(SUBCOMMANDS)}{did_you_mean(name, SUBCOMMANDS)}")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    module = import_module(f"gptlite.kernels.{SUBCOMMANDS[name]}")
    sys.argv[1:] = rest  # run_tool reads them
    run_tool(module.run, module.Options, module.__doc__)
