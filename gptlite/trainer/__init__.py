"""Training loop, optimizer steps, training state, evaluation and reports."""
