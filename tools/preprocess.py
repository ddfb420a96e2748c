"""`gptlite preprocess` from a checkout; `--help` says more."""

from gptlite.commands.preprocess import main

if __name__ == "__main__":
    main()
