"""Elastic runs: ranks that survive the loss of others, checkpoints in memory, decisions on slow and wrong nodes."""
