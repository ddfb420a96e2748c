"""Models, a folder each, and what makes any of them a part of a run."""
