"""`gptlite generate` from a checkout; see `--help`."""

from gptlite.commands.generate import main

if __name__ == "__main__":
    main()
