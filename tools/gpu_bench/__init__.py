"""The parts of tools/bench_gpu.py, a module each: what it measures on a GPU, and a model of a step that needs none."""
