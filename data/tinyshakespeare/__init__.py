"""Recipe of the corpus Tiny Shakespeare."""
