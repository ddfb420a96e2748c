"""Optimizers, gradient clipping, learning-rate schedules, and the optimizer state a checkpoint holds."""
