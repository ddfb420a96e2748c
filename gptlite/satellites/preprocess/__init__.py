"""Tokenization of corpora into prepared folders, in parallel and resumable after a kill. Start at `run.py`."""
