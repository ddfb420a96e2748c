"""Activations of an MLP, with their numbers in `gptlite_kernels.h`."""

ACTIVATIONS = {"gelu_tanh": 0, "gelu_erf": 1, "relu": 2, "relu2": 3, "swiglu": 4, "geglu": 5}


def is_gated(kind: int) -> bool:
    """Return True if the activation is gated: each even column of its input is the gate of the next column."""
    return kind >= ACTIVATIONS["swiglu"]
