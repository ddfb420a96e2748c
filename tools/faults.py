"""Mutation testing: plant seeded faults in the product, one at a time, and report which tests catch each."""

from typing import NoReturn

from gptlite.config.command_line import Subcommand, run_subcommand

SUBCOMMANDS = {name: Subcommand(f"fault_trials.{name}") for name in ("run", "map", "list", "table", "cuda")}

HELP = """\
Plant seeded faults in the product, one at a time, and report which tests catch each.

  map                           measure which lines each test runs (half an hour of two cores; kept for later runs)
  list                          print the faults that a seed draws
  run out=FILE                  try the faults (1 to 2 minutes each), and append the results to FILE
  table before=FILE after=FILE  compare two results: faults that the tests of before caught, but those of after do not
  cuda                          plant the faults of a table in the CUDA kernels, which run in the emulator

For instance, to compare the tests of two revisions, and to try the slow tests on what remains:

  python tools/faults.py run tests=main out=before.jsonl
  python tools/faults.py run faults=before.jsonl out=after.jsonl
  python tools/faults.py run uncaught=after.jsonl mark=slow out=slow.jsonl
  python tools/faults.py table before=before.jsonl after=after.jsonl slow=slow.jsonl

Faults are planted in copies in the temporary folder; the checkout itself does not change.
Options are key=value; `python tools/faults.py SUBCOMMAND --help` lists them. Exit codes: 0 success, 2 refused."""


def main() -> NoReturn:
    """Run the command line and exit."""
    run_subcommand(SUBCOMMANDS, HELP)


if __name__ == "__main__":
    main()
