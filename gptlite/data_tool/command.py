"""The command line `gptlite data`: its subcommands, a module each."""

from typing import NoReturn

from gptlite.config.command_line import Subcommand, run_subcommand

SUBCOMMANDS = {
    "inspect": Subcommand("gptlite.data_tool.inspect", ("PATH",), more=True),
    "show": Subcommand("gptlite.data_tool.show", ("PATH",)),
    "verify": Subcommand("gptlite.data_tool.verify", ("PATH",), more=True),
    "import": Subcommand("gptlite.data_tool.import_", ("PATH",)),
}

HELP = """\
Token files: what is in them and whether they are whole; those of other frameworks made ours.

  inspect PATH ...    documents, tokens, bytes per token, lengths, tokenizer
  show PATH sample=N  the text of a sample: of a prepared folder, or of a run; of a run also step=N, what it read then
  verify PATH ...     reads every byte: index, vocabulary, ends of documents, hash
  import PATH         makes a prepared folder of nanoGPT's, llm.c's or Megatron's token files

A PATH is a prepared folder (tokenizer/, train and val .bin/.idx) or one dataset: PREFIX, PREFIX.bin or PREFIX.idx.
Options are key=value; `gptlite data SUBCOMMAND --help` lists them.
Exit codes: 0 fine, 1 damaged, 2 refused."""


def main() -> NoReturn:
    """Runs the command line and exits."""
    run_subcommand(SUBCOMMANDS, HELP)
