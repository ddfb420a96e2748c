"""Checkpoints, with atomic commits and verification before loading. Start at `checkpointer.py`."""
