"""Fused kernels, installed as `gptlite.kernels`. `library.load` compiles them on first use.

The C side starts at `include/gptlite_kernels.h`.
"""
