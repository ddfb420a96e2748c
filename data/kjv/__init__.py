"""The King James Bible."""
