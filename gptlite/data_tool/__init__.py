"""The command `gptlite-data`: looking at token files and checking them. Start at `command.py`."""
