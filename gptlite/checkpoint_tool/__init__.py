"""The command `gptlite checkpoint`: looking at checkpoints, checking and converting them. Start at `command.py`."""
