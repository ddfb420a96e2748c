"""Sweeps: many runs from one command, each a cell with its own ranks, and their results."""
