"""Recipe of the corpus openwebtext: OpenWebText."""
