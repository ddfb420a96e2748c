"""Sweeps: many runs from one command, each a cell on separate ranks, and the comparison of their results."""
