"""Recipe of the corpus fineweb: FineWeb."""
