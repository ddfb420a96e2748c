"""Private names of torch: docs/torch_versions.md lists all that the code uses, and the installed torch has them."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gptlite"
INSTALLED = tuple(map(int, torch.__version__.split(".")[:2]))
# Private names of Python and of other libraries.
OTHERS = {
    *("_current_frames", "_exit", "_replace"),  # sys, os, named tuples
    *("BasicSweeper", "get_args_parser", "_target_"),  # Hydra
    *("_mergeable_ranks", "_pat_str", "_special_tokens"),  # tiktoken
}


class Row(NamedTuple):
    """A name of the page: what it belongs to, the files that use it, and the versions for which they do."""

    name: str
    owner: str
    files: tuple[str, ...]
    versions: str

    @property
    def is_used(self) -> bool:
        """Whether the code uses it with the installed version."""
        if "GPUs" in self.versions and torch.version.cuda is None:
            return False
        numbers = [tuple(map(int, each.split("."))) for each in re.findall(r"\d+\.\d+", self.versions)]
        if not numbers:
            return True
        first, last = numbers[0], (99, 0) if "later" in self.versions else numbers[-1]
        return first <= INSTALLED <= last


def rows() -> list[Row]:
    """The tables of the page."""
    found = []
    for line in (ROOT / "docs" / "torch_versions.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, owner, files, versions, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            (of,) = re.findall(r"`(.+?)`", owner)
            found += [
                Row(name, of, tuple(re.findall(r"`(.+?)`", files)), versions) for name in re.findall(r"`(.+?)`", names)
            ]
    return found


ROWS = rows()


def private_names() -> Iterator[tuple[str, str]]:
    """Names in the package that begin with an underscore and are not defined there, or are imported from a private
    module, each with its file."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name in _private(node):
                if not name.startswith("__") and name not in own | OTHERS:
                    yield name, str(path.relative_to(PACKAGE))


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case (
            ast.FunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.arg(arg=name)
            | ast.Name(id=name, ctx=ast.Store())
        ):
            yield name
        case ast.Attribute(value=ast.Name(id="self" | "cls" | "instance"), attr=name, ctx=ast.Store()):
            yield name


def _private(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ImportFrom(module=str(module), names=names) if not module.startswith(("gptlite", "__future__")):
            within = any(part.startswith("_") for part in module.split("."))
            # A module is no name of its own: its names are attributes elsewhere in the file.
            yield from (each.name for each in names if each.name.startswith("_") or within)
        case ast.Attribute(attr=name) if name.startswith("_"):
            yield name
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
            if name.startswith("_"):
                yield name


def test_the_page_lists_every_private_name() -> None:
    # Modules, by which the names in them are reached, and an attribute of Hugging Face's datasets.
    through = {"_C", "_dynamo", "_autograd", "config", "_fingerprint"}
    listed = {(row.name, file) for row in ROWS for file in row.files}
    anywhere = {row.name for row in ROWS if not row.files} | through
    assert {each for each in private_names() if each[0] not in anywhere} - listed == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.owner}")
def test_a_listed_name_is_used(row: Row) -> None:
    files = [PACKAGE / file for file in row.files] or PACKAGE.rglob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert re.search(rf"\b{row.name}\b", text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.owner}")
def test_the_installed_torch_has(row: Row) -> None:
    """Or has its successor: a name is looked up, or searched in the source for attributes of instances."""
    owner = resolved(row.owner)
    found = hasattr(owner, row.name)
    if not found and inspect.ismodule(owner) and getattr(owner, "__file__", "").endswith(".py"):
        found = re.search(rf"\b{row.name}\b", inspect.getsource(owner)) is not None
    assert found or not row.is_used, f"torch {torch.__version__} has no {row.owner}.{row.name}"


def resolved(path: str) -> Any:
    """The module or object that a dotted path names."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"no module in {path}")
