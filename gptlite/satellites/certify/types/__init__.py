"""Types of a training step: values that are equal on all ranks of an axis, that differ, or that are partial sums."""
