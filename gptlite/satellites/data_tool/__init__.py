"""The command `gptlite data`: inspects, verifies and imports token files. Start at `command.py`."""
