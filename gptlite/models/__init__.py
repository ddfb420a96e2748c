"""Models, one folder each, and the code shared by all models."""
