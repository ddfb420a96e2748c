"""The command `gptlite checkpoint`, which lists, checks, compares and converts checkpoints. Start at `command.py`."""
