"""The command line `gptlite checkpoint`: its subcommands, a module each."""

from typing import NoReturn

from gptlite.config.command_line import Subcommand, run_subcommand

SUBCOMMANDS = {
    "ls": Subcommand("gptlite.checkpoint_tool.ls", ("PATH",), more=True),
    "inspect": Subcommand("gptlite.checkpoint_tool.inspect", ("RUN_OR_STEP",)),
    "verify": Subcommand("gptlite.checkpoint_tool.verify", ("RUN_OR_STEP",), more=True),
    "diff": Subcommand("gptlite.checkpoint_tool.diff", ("A", "B")),
    "prune": Subcommand("gptlite.checkpoint_tool.prune", ("RUN",)),
    "export": Subcommand("gptlite.checkpoint_tool.export", ("RUN_OR_STEP", "TARGET")),
    "import": Subcommand("gptlite.checkpoint_tool.import_", ("HF_FOLDER", "RUN_DIR")),
}

HELP = """\
Checkpoints of runs: what there is, whether it is whole, how two differ; tidying up, and Hugging Face's format.

  ls PATH ...                  the checkpoints of runs, in a table
  inspect RUN_OR_STEP          what is in one: step, layout, sizes, configuration, tensors
  verify RUN_OR_STEP ...       reads every byte again and compares
  diff A B                     what differs between two runs, checkpoints or config.yaml files
  prune RUN keep=K             removes all but the newest K
  export RUN_OR_STEP TARGET    writes the weights as a Hugging Face folder
  import HF_FOLDER RUN_DIR     makes a checkpoint of a Hugging Face folder

A RUN is a run's folder or its checkpoints folder, a STEP a folder step-00000100. Options are key=value;
`gptlite checkpoint SUBCOMMAND --help` lists them.
Exit codes: 0 fine, 1 damaged or different, 2 refused."""


def main() -> NoReturn:
    """Runs the command line and exits."""
    run_subcommand(SUBCOMMANDS, HELP)
