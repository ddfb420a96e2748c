"""Sweeps: many runs from one command, and the comparison of their results. Each run is a cell on separate ranks."""
