"""Recipe of the corpus OpenWebText."""
