"""Fused kernels, installed as `gptlite.kernels`. `library.load` compiles them on first use.

The C interface is declared in `include/gptlite_kernels.h`.
"""
