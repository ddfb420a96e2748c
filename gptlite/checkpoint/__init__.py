"""Checkpoints, with atomic commits and verification before loading. Start reading at `checkpointer.py`."""
