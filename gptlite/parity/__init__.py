"""Parity check of two layouts of one configuration, step by step, with the first tensor that differs."""
