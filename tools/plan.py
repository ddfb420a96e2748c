"""`gptlite plan` from a checkout; see `--help`."""

from gptlite.commands.plan import main

if __name__ == "__main__":
    main()
