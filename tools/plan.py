"""`gptlite plan` from a checkout; `--help` says more."""

from gptlite.commands.plan import main

if __name__ == "__main__":
    main()
