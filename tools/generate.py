"""`gptlite generate` from a checkout; `--help` says more."""

from gptlite.commands.generate import main

if __name__ == "__main__":
    main()
