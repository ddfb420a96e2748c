"""`gptlite preprocess` from a checkout; see `--help`."""

from gptlite.commands.preprocess import main

if __name__ == "__main__":
    main()
