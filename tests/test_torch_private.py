"""Private names of torch are in one package: docs/torch_versions.md lists them, and the installed torch has them."""

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
PRIVATE = ROOT / "gptlite" / "torch_private"
HYDRA = ROOT / "gptlite" / "config" / "hydra_private.py"
INSTALLED = tuple(map(int, torch.__version__.split(".")[:2]))
# Private names of Python and of other libraries, and the key of Hydra's configurations that names a class.
OTHERS = {
    *("_current_frames", "_exit", "_getframe", "_replace"),  # sys, os, named tuples
    *("_mergeable_ranks", "_pat_str", "_special_tokens", "_fingerprint"),  # tiktoken, datasets
    "_target_",
}

# Names of torch that the code's own methods and strings have as well.
SHARED = {"_apply", "_buffers", "_schema", "_stages"}


class Row(NamedTuple):
    """A name of the page: what it belongs to, the files of PRIVATE that use it, and for which versions."""

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


SOURCES = [*ROOT.glob("*.py"), *(ROOT / "gptlite").rglob("*.py")]
SOURCES += [path for folder in ("data", "examples", "kernels", "tools") for path in (ROOT / folder).rglob("*.py")]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
OWN = {name for tree in TREES.values() for node in ast.walk(tree) for name in _defined(node)}


def private_names(path: Path, tree: ast.AST) -> set[str]:
    """Names of torch, Hydra and omegaconf in a file that begin with an underscore, or are in such a module: imported
    ones, attributes, methods that replace one, and those that a string spells."""
    listed = {row.name for row in ROWS if row.name.startswith("_")}
    own = (OWN - listed) | {name for node in ast.walk(tree) for name in _defined(node)}
    used = {name for node in ast.walk(tree) for name in _private(node) if not name.startswith("__")}
    return (used - own - OTHERS) | (_spelled(tree) & listed - SHARED)


def _private(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (each.name for each in names if _is_library(each.name) and _is_within(each.name))
        case ast.ImportFrom(module=str(module), names=names) if _is_library(module):
            yield from (each.name for each in names if _is_within(f"{module}.{each.name}"))
        case ast.Attribute(attr=name) if name.startswith("_"):
            yield name
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
            if name.startswith("_"):
                yield name


def _spelled(tree: ast.AST) -> set[str]:
    """Strings of a file, and names of its methods."""
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return strings | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "hydra", "omegaconf")


def _is_within(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def test_private_names_are_in_one_place_for_each_library() -> None:
    others = {path: tree for path, tree in TREES.items() if path != HYDRA and path.parent != PRIVATE}
    assert len(others) > 300
    found = {str(path.relative_to(ROOT)): private_names(path, tree) for path, tree in others.items()}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch.utils._pytree import tree_map", "tree_map"),
        ("from hydra._internal.utils import get_args_parser", "get_args_parser"),
        ("import torch._dynamo", "torch._dynamo"),
        ("x = torch._foreach_add_(a, b)", "_foreach_add_"),
        ("x = getattr(node, '_get_node')(a)", "_get_node"),
        ("class Stage(Base):\n    def _get_init_p2p_neighbors_ops(self): ...", "_get_init_p2p_neighbors_ops"),
        ("KINDS = {'_allgather_base_': 1}", "_allgather_base_"),
    ],
)
def test_a_private_name_elsewhere_is_seen(line: str, name: str) -> None:
    assert name in private_names(ROOT / "train.py", ast.parse(line))


def test_the_page_lists_every_private_name() -> None:
    # Modules, by which the names in them are reached.
    through = {"_C", "torch._C._distributed_c10d", "_autograd", "config", "utils"}
    listed = {(row.name, file) for row in ROWS for file in row.files}
    assert {file for _, file in listed} == {path.name for path in PRIVATE.glob("*.py")} - {"__init__.py"}
    used = {
        (name, path.name)
        for path, tree in TREES.items()
        if path.parent == PRIVATE
        for node in ast.walk(tree)
        for name in _private(node)
        if not name.startswith("__") and name not in through and (name not in OWN or (name, path.name) in listed)
    }
    assert used - listed == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.owner}")
def test_a_listed_name_is_used(row: Row) -> None:
    text = "".join((PRIVATE / file).read_text(encoding="utf-8") for file in row.files)
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
