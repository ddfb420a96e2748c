"""One name, one thing: classes have names of their own, and a value that lives long has a name that says what it is."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("gptlite", "kernels", "data", "tools")
EACH_COMMAND = {"Arguments", "Options"}  # every command has its own
CORE = (
    *("checkpoint", "config", "data", "launch", "metrics", "models", "ops", "optimizer", "parallelism"),
    *("tokenizers", "torch_private", "trainer"),
)
EACH_MODULE = {"build", "main"}  # of a module that another loads by its name, or runs
VAGUE = {"found", "given", "words", "each", "its"}
LONG = 3  # lines, from the first use of a name to the last
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Uses = dict[str, list[int]]  # lines of each name


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def bound(scope: ast.AST) -> set[str]:
    """The names that a function, a lambda or a comprehension binds by its parameters or targets."""
    if isinstance(scope, COMPREHENSIONS):
        return {node.id for part in scope.generators for node in ast.walk(part.target) if isinstance(node, ast.Name)}
    assert isinstance(scope, (*FUNCTIONS, ast.Lambda))
    return {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)}


def scopes(node: ast.AST, outer: Uses, every: list[Uses]) -> None:
    """Add the uses of vague names below `node` to their scopes, and new scopes to `every`."""
    for child in ast.iter_child_nodes(node):
        uses = outer
        if isinstance(child, (*COMPREHENSIONS, *FUNCTIONS, ast.Lambda)):
            own = bound(child) | (VAGUE if isinstance(child, FUNCTIONS) else set())
            start = [child.lineno] if isinstance(child, FUNCTIONS) else []
            fresh = {name: start if name in bound(child) else [] for name in own & VAGUE}
            fresh = {name: list(lines) for name, lines in fresh.items()}
            every.append(fresh)
            uses = {**outer, **fresh}
        if isinstance(child, ast.Name) and child.id in VAGUE:
            uses.setdefault(child.id, []).append(child.lineno)
        scopes(child, uses, every)


def long_lived(tree: ast.Module) -> list[tuple[int, str]]:
    """The first line and the name of each vague local or parameter that lives too long."""
    every: list[Uses] = []
    scopes(tree, {}, every)
    spans = [(lines, name) for uses in every for name, lines in uses.items() if lines]
    return sorted((min(lines), name) for lines, name in spans if max(lines) - min(lines) > LONG)


def test_a_value_that_lives_long_has_a_name_that_says_what_it_is() -> None:
    assert [(path, *row) for path, tree in sources(*FOLDERS) for row in long_lived(tree)] == []


def test_the_scopes_of_a_name_are_counted_separately() -> None:
    text = "def f(a):\n    found = a\n\n\n\n    return [found for found in a]\ndef g(given):\n\n\n\n    return given\n"
    assert long_lived(ast.parse(text)) == [(7, "given")]
    assert long_lived(ast.parse("def f():\n    each = 1\n\n\n\n    return each\n")) == [(2, "each")]


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, tree in sources("gptlite", "kernels", "data"):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in EACH_COMMAND:
                places[node.name].append(path)
    assert len(places) > 300
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_two_functions_of_the_core_have_one_name() -> None:
    places = defaultdict(list)
    for path, tree in sources(*(f"gptlite/{name}" for name in CORE)):
        for node in tree.body:
            if isinstance(node, FUNCTIONS) and not node.name.startswith("_") and node.name not in EACH_MODULE:
                places[node.name].append(path)
    assert len(places) > 400
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
