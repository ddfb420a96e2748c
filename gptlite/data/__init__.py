"""The data pipeline: tokenizers, token files, the sample order and the loader. Start at `build.py`."""
