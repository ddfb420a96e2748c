"""The command `gptlite data`: looking at token files, checking and importing them. Start at `command.py`."""
