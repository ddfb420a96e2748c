"""Activations of an MLP, by the number that `gptlite_kernels.h` has for them."""

ACTIVATIONS = {"gelu_tanh": 0, "gelu_erf": 1, "relu": 2, "relu2": 3, "swiglu": 4, "geglu": 5}


def is_gated(kind: int) -> bool:
    """Return True if every other column of the input is the gate of the next one."""
    return kind >= ACTIVATIONS["swiglu"]
