"""The GPT: plain modules, initial weights, FLOPs, generation. `parallelize.py` is where it meets the mesh."""
