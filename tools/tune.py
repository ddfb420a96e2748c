"""`gptlite tune` from a checkout; see `--help`."""

from gptlite.commands.tune import main

if __name__ == "__main__":
    main()
