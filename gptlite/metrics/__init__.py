"""Metrics of a run, and the sinks that record them."""
