"""Traces a step of another source tree, maybe another commit's, and prints JSON.

python tools/gpu_bench/other_tree.py TREE MODEL MICRO_BATCH
"""

import json
import sys
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path


def use_tree(tree: Path) -> None:
    """Makes another source tree the one that is imported; an older one lacks the hook for its own packages."""
    sys.path.insert(0, str(tree))
    import gptlite

    found = Path(gptlite.__file__).parents[1]
    if found.resolve() != tree.resolve():
        raise RuntimeError(f"gptlite is imported from {found}, not {tree}")
    if not hasattr(gptlite, "_SourceTree"):
        sys.meta_path.insert(0, _Beside(tree))


class _Beside:
    """Finds gptlite.conf, gptlite.kernels and gptlite.recipes in a tree whose gptlite does not."""

    FOLDERS = {"gptlite.conf": "conf", "gptlite.kernels": "kernels", "gptlite.recipes": "data"}  # noqa: RUF012

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The package's spec, if it is one of them."""
        if name not in self.FOLDERS:
            return None
        folder = self.tree / self.FOLDERS[name]
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


def main(tree: str, size: str, micro_batch: str) -> None:
    """Prints the trace of a step as JSON."""
    use_tree(Path(tree))
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from gpu_bench.step_trace import trace_step

    print(json.dumps(asdict(trace_step(size, int(micro_batch)))))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are the package's
    main(*sys.argv[1:])
