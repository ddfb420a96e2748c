"""Command line of `gptlite checkpoint`, with one module per subcommand."""

from typing import NoReturn

from gptlite.config.command_line import Subcommand, run_subcommand

SUBCOMMANDS = {
    "ls": Subcommand("gptlite.satellites.checkpoint_tool.ls", ("PATH",), more=True),
    "inspect": Subcommand("gptlite.satellites.checkpoint_tool.inspect", ("RUN_OR_STEP",)),
    "verify": Subcommand("gptlite.satellites.checkpoint_tool.verify", ("RUN_OR_STEP",), more=True),
    "diff": Subcommand("gptlite.satellites.checkpoint_tool.diff", ("A", "B")),
    "prune": Subcommand("gptlite.satellites.checkpoint_tool.prune", ("RUN",)),
    "export": Subcommand("gptlite.satellites.checkpoint_tool.export", ("RUN_OR_STEP", "TARGET")),
    "import": Subcommand("gptlite.satellites.checkpoint_tool.import_", ("FOLDER", "RUN_DIR")),
    "upcycle": Subcommand("gptlite.satellites.checkpoint_tool.upcycle", ("RUN_OR_STEP", "RUN_DIR")),
}

HELP = """\
List, verify, compare and remove checkpoints of runs, and convert them from and to Hugging Face's format.

  ls PATH ...                  lists the checkpoints of runs in a table
  inspect RUN_OR_STEP          prints step, layout, sizes, configuration and tensors of a checkpoint
  verify RUN_OR_STEP ...       reads every byte and compares it with the manifest
  diff A B                     compares two runs, checkpoints or config.yaml files
  prune RUN keep=K             removes all but the newest K; yes=true is required
  export RUN_OR_STEP TARGET    writes the weights as a Hugging Face folder
  import FOLDER RUN_DIR        creates a checkpoint from a Hugging Face or Meta folder
  upcycle RUN_OR_STEP RUN_DIR  creates a mixture-of-experts model whose experts are copies of the dense MLP

RUN is a run folder or its checkpoints folder; STEP is a folder such as step-00000100. Options are key=value;
`gptlite checkpoint SUBCOMMAND --help` lists them.
Exit codes: 0 success, 1 damaged or different, 2 refused."""


def main() -> NoReturn:
    """Run the command line and exit."""
    run_subcommand(SUBCOMMANDS, HELP)
