"""Optimizers, gradient clipping, learning-rate schedules, and the optimizer state that a checkpoint stores."""
