"""Limits of torchao, found without importing it, which takes seconds. Callers raise the errors."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

OLDEST = (0, 18)
INSTALL = "pip install 'torchao>=0.18'"
BLOCK_8BIT = 256  # elements that share a scale
LEAST_8BIT = 4096  # moments of smaller tensors are fp32
OPTIMIZER_STATE = "optim/subclass_8bit.py"  # the file with the class that gptlite uses


def why_not() -> str:
    """Return the reason why torchao cannot be used here, and the fix. Return "" if the needed files are present."""
    spec = find_spec("torchao")
    if spec is None:
        return f"torchao is not installed; {INSTALL}"
    try:
        release = version("torchao")
    except PackageNotFoundError:
        return f"the package torchao in {spec.origin} was not installed by pip, so its version is not known; {INSTALL}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if numbers < OLDEST:
        return f"torchao {release} is older than 0.18, the oldest tested version; {INSTALL}"
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / OPTIMIZER_STATE).is_file() for folder in folders):
        return (
            f"torchao {release} has no {OPTIMIZER_STATE}: this version is not supported; pip install 'torchao==0.18.*'"
        )
    return ""


def in_8_bits(elements: int) -> bool:
    """Return True if a local tensor with this many elements has 8-bit moments. This is torchao's rule."""
    return elements >= LEAST_8BIT and elements % BLOCK_8BIT == 0
