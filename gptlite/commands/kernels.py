"""Command `gptlite kernels`: its subcommands, one module each."""

from typing import NoReturn

from gptlite.config.command_line import Subcommand, run_subcommand

MODULES = {"build": "prebuild", "info": "info", "test": "check", "bench": "bench"}
SUBCOMMANDS = {name: Subcommand(f"gptlite.kernels.{module}") for name, module in MODULES.items()}

HELP = """\
Fused kernels on this machine. They are compiled automatically at first use; these commands build and check them.

  build    compile them now, unless they are already compiled
  info     show compilers, cache, library, and the implementation of each op on this machine
  test     compare the results of every op with torch's in float64
  bench    compare the speed of every op with torch's

Options are key=value; `gptlite kernels SUBCOMMAND --help` lists them.
Exit codes: 0 success, 1 failed, 2 refused."""


def main() -> NoReturn:
    """Run the command line and exit."""
    run_subcommand(SUBCOMMANDS, HELP)
