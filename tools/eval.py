"""`gptlite eval` from a checkout; `--help` says more."""

from gptlite.commands.eval import main

if __name__ == "__main__":
    main()
