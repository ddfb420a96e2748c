"""`gptlite checkpoint` from a checkout; see `--help`."""

from gptlite.checkpoint_tool.command import main

if __name__ == "__main__":
    main()
