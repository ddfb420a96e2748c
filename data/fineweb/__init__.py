"""FineWeb."""
