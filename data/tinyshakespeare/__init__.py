"""Recipe of the corpus tinyshakespeare: Tiny Shakespeare."""
