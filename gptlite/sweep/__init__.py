"""Sweeps: many runs from one command, each a cell with its own ranks, and what came of them."""
