"""`gptlite parity` from a checkout; `--help` says more."""

from gptlite.commands.parity import main

if __name__ == "__main__":
    main()
