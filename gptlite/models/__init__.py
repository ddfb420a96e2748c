"""Models, one folder each, and the common code that makes a model part of a run."""
