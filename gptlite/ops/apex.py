"""NVIDIA Apex, found without importing it. No errors are raised here: rooms say what they wanted it for."""

from importlib.util import find_spec
from pathlib import Path

BUILD = (
    "build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . "
    "in a clone of https://github.com/NVIDIA/apex"
)
# What each of its parts that are used here is compiled into.
OPTIMIZERS, LAYER_NORM = "amp_C", "fused_layer_norm_cuda"


def why_not(extension: str) -> str:
    """Why a part of Apex cannot be used here, and how to mend that; empty where it can, as far as files tell.

    PyPI's `apex` is another project's. A build without CUDA extensions can be imported, and raises when it is used.
    """
    found = find_spec("apex")
    if found is None:
        return f"Apex is not installed; {BUILD}"
    folders = [Path(folder) for folder in found.submodule_search_locations or []]
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        place = folders[0] if folders else found.origin
        return f"the package apex in {place} is not NVIDIA's, PyPI has another by that name; uninstall it, and {BUILD}"
    if find_spec(extension) is None:
        return f"Apex in {folders[0]} is a Python-only build, without {extension}; {BUILD}"
    return ""
