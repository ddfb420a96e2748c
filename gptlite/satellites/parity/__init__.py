"""Step-by-step parity check of a layout against a single process. It names the first tensor that differs."""
