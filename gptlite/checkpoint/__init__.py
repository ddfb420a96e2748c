"""Checkpoints: committed whole or not at all, verified before they are loaded. Start reading at `checkpointer.py`."""
