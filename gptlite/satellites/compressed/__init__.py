"""Sums over ranks whose messages are compressed, with error feedback (docs/compressed.md)."""
