"""Token files: inspect, show, verify, import. `--help` says more."""

from gptlite.data_tool.command import main

if __name__ == "__main__":
    main()
