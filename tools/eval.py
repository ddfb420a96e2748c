"""`gptlite eval` from a checkout; see `--help`."""

from gptlite.commands.eval import main

if __name__ == "__main__":
    main()
