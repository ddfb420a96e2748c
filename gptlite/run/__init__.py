"""Runs: construction from a configuration, restoring, run folder, banner and summary."""
