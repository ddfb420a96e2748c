"""gptlite: a Hydra-configured, Megatron-style GPT pretraining framework. Start reading at `pretrain.py`."""

__version__ = "0.1.0"
