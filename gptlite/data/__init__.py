"""Text to batches: tokenizers, files of tokens, the order they are read in, loading. Start at `build.py`."""
