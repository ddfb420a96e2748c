"""Corpora to prepared folders: read, tokenized by many processes, written so that a kill loses little."""
