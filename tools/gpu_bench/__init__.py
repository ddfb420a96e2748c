"""Parts of tools/bench_gpu.py, one module each: measurements on a GPU, and a model of a step that needs no GPU."""
