"""Example plugins: custom models and datasets."""
