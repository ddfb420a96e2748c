"""Command line of `gptlite data`. Each subcommand is a module."""

from typing import NoReturn

from gptlite.config.command_line import Subcommand, run_subcommand

SUBCOMMANDS = {
    "inspect": Subcommand("gptlite.satellites.data_tool.inspect", ("PATH",), more=True),
    "show": Subcommand("gptlite.satellites.data_tool.show", ("PATH",)),
    "verify": Subcommand("gptlite.satellites.data_tool.verify", ("PATH",), more=True),
    "import": Subcommand("gptlite.satellites.data_tool.import_", ("PATH",)),
}

HELP = """\
Inspect, show and verify token files, and import those of other frameworks.

  inspect PATH ...    print documents, tokens, bytes per token, lengths, tokenizer
  show PATH sample=N  print the text of a sample of a prepared folder or a run; step=N: all samples of a run's step
  verify PATH ...     check every byte: index, vocabulary, EOD tokens, hash
  import PATH         make a prepared folder from token files of nanoGPT, llm.c or Megatron

A PATH is a prepared folder (tokenizer/, train and val .bin/.idx) or one dataset: PREFIX, PREFIX.bin or PREFIX.idx.
Options are key=value; `gptlite data SUBCOMMAND --help` lists them.
Exit codes: 0 success, 1 damaged, 2 refused."""


def main() -> NoReturn:
    """Run the command line and exit."""
    run_subcommand(SUBCOMMANDS, HELP)
