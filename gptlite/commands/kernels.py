"""The command line `gptlite kernels`: its subcommands, a module each."""

from typing import NoReturn

from gptlite.config.command_line import Subcommand, run_subcommand

MODULES = {"build": "prebuild", "info": "info", "test": "check", "bench": "bench"}
SUBCOMMANDS = {name: Subcommand(f"gptlite.kernels.{module}") for name, module in MODULES.items()}

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
    run_subcommand(SUBCOMMANDS, HELP)
