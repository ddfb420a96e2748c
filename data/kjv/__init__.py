"""Recipe of the King James Bible."""
