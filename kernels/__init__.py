"""Fused kernels, installed as `gptlite.kernels`. None yet: every op runs its reference."""
