"""One CUDA graph for a training step. `start/pretrain.py` attaches it; the trainer knows only `Step.execute`."""
