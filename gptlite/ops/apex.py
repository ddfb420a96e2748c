"""Detection of NVIDIA Apex without importing it. Callers raise the errors."""

from importlib.util import find_spec
from pathlib import Path

BUILD = (
    "build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . "
    "in a clone of https://github.com/NVIDIA/apex"
)
# Extension modules of the Apex components used here.
OPTIMIZERS, LAYER_NORM = "amp_C", "fused_layer_norm_cuda"


def why_not(extension: str) -> str:
    """Return the reason why an Apex extension cannot be used here, and the fix; an empty string if its files are
    present.

    PyPI's `apex` is a different project. A build without CUDA extensions can be imported, but raises when it is used.
    """
    spec = find_spec("apex")
    if spec is None:
        return f"Apex is not installed; {BUILD}"
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        place = folders[0] if folders else spec.origin
        return f"the package apex in {place} is not NVIDIA's: PyPI's apex is another project; uninstall it, and {BUILD}"
    if find_spec(extension) is None:
        return f"Apex in {folders[0]} is a Python-only build, without {extension}; {BUILD}"
    return ""
