"""`gptlite import-config` from a checkout; see `--help`."""

from gptlite.commands.import_config import main

if __name__ == "__main__":
    main()
