"""Examples of models and data of one's own."""
