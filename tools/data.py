"""`gptlite data` from a checkout; see `--help`."""

from gptlite.data_tool.command import main

if __name__ == "__main__":
    main()
