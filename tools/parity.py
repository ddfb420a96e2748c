"""`gptlite parity` from a checkout; see `--help`."""

from gptlite.commands.parity import main

if __name__ == "__main__":
    main()
