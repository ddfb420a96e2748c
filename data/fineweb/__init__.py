"""Recipe of the corpus FineWeb."""
