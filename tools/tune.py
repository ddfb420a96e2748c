"""`gptlite tune` from a checkout; `--help` says more."""

from gptlite.commands.tune import main

if __name__ == "__main__":
    main()
