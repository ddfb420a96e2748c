"""Checkpoints of runs: ls, inspect, verify, diff, prune, export, import. See `--help`."""

from gptlite.checkpoint_tool.command import main

if __name__ == "__main__":
    main()
