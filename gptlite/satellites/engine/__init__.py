"""Engine for programs that keep their own training loop: `gptlite.initialize`."""
