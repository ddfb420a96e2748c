"""Token files: inspect, show, verify, import. See `--help`."""

from gptlite.data_tool.command import main

if __name__ == "__main__":
    main()
