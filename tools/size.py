"""Count the lines of each package and of what training imports, and list long files: `python tools/size.py`.

Also print functions of many parameters, and imports that go up or around.

All lines count, as in `wc -l`. In a notebook, only the lines of code cells count. Tests are counted separately.
"""

import ast
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gptlite", "kernels", "data", "conf", "tools", "examples", "tests")
LANGUAGES = {
    **dict.fromkeys((".py", ".ipynb"), "Python"),
    **dict.fromkeys((".cpp", ".cc", ".c", ".h", ".hpp"), "C++"),
    **dict.fromkeys((".cu", ".cuh"), "CUDA"),
    **dict.fromkeys((".yaml", ".yml"), "YAML"),
}
COLUMNS = ("Python", "C++", "CUDA", "YAML")
LIMIT = 400  # lines; a longer file should be split
LARGEST = 10
CORE = "gptlite.pretrain"  # the module whose imports are followed
MANY = 8  # parameters; values that travel together should be one
LAYERS = "tests/test_imports.py"  # its table ROOMS has the packages, lowest first
BESIDE = {"gptlite.kernels": "kernels", "gptlite.recipes": "data"}  # packages whose folder is not below gptlite/


def source_files(root: Path) -> Iterator[Path]:
    """Yield the source files of a checkout, relative to `root`: top-level scripts and the files in FOLDERS."""
    found = [*root.glob("*.py"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    for path in sorted(found):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.suffix in LANGUAGES and path.is_file() and not hidden:
            yield relative


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, or of a notebook's code cells."""
    if path.suffix != ".ipynb":
        return len(path.read_bytes().splitlines())
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return sum(len("".join(cell["source"]).splitlines()) for cell in cells if cell["cell_type"] == "code")


def room(path: Path) -> str:
    """Return the name of the row that counts a file.

    This is the package for a file in gptlite/, the top-level folder for other files, or the name of a top-level script.
    """
    top, *inner = path.parts
    depth = 2 if inner[:1] == ["satellites"] else 1
    return "/".join([top, *inner[:depth]]) if top == "gptlite" and len(inner) > depth else top


def report(root: Path) -> str:
    """Return the table of packages and the largest files as text. A last line without a newline counts."""
    lines = {path: count_lines(root / path) for path in source_files(root)}
    rooms: dict[str, dict[Path, int]] = defaultdict(dict)
    for path, count in lines.items():
        rooms[room(path)][path] = count
    tests = rooms.pop("tests", {})
    code = {path: count for path, count in lines.items() if path not in tests}
    header = f"{'package':<34}{'files':>7}" + "".join(f"{column:>9}" for column in COLUMNS)
    rule = "-" * len(header)
    rows = [_row(name, files) for name, files in sorted(rooms.items())]
    table = [header, rule, *rows, rule, _row("all but tests", code), _row("tests", tests)]
    return "\n".join(
        [*table, *_reach(root), *_structure(root), "", *_largest(code, "files"), "", *_largest(tests, "tests")]
    )


def imported(root: Path, module: str, inside_functions: bool) -> set[Path]:
    """Return the files that a module imports, directly or through others, and its own file, relative to `root`.

    Imports `if TYPE_CHECKING` do not count. Importing a module also imports the packages above it.
    """
    files: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        for end in range(1, name.count(".") + 2):
            file = _file_of(root, ".".join(name.split(".")[:end]))
            if file is not None and file not in files:
                files.add(file)
                waiting += _imports(ast.parse((root / file).read_text(encoding="utf-8")), inside_functions)
    return files


def _file_of(root: Path, module: str) -> Path | None:
    for package, folder in BESIDE.items():
        if f"{module}.".startswith(f"{package}."):
            module = folder + module.removeprefix(package)
    path = Path(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if (root / file).is_file()), None)


def _imports(node: ast.AST, inside_functions: bool) -> Iterator[str]:
    """Yield the dotted names that a file imports; of `from a import b`, both `a` and `a.b`."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (module, *(f"{module}.{alias.name}" for alias in names))
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not inside_functions:
                pass
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                yield from _imports(ast.Module(child.orelse, []), inside_functions)
            case _:
                yield from _imports(child, inside_functions)


def _reach(root: Path) -> Iterator[str]:
    """Yield lines on the files and lines that training imports."""
    if _file_of(root, CORE) is None:
        return
    yield ""
    for inside_functions, words in ((False, "at import"), (True, "with imports inside functions")):
        files = imported(root, CORE, inside_functions)
        yield f"{CORE} imports {len(files)} files, {sum(count_lines(root / each) for each in files):,} lines {words}"


def _structure(root: Path) -> Iterator[str]:
    """Yield lines on functions of many parameters, and on imports that go up or around, inside functions too."""
    if not (root / LAYERS).is_file():
        return
    folders = [root / folder for folder in ("gptlite", "kernels", "data", "tools")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for folder in folders for path in folder.rglob("*.py")}
    functions = [
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if _num_parameters(node) >= MANY
    ]
    yield f"{len(functions)} functions have {MANY} or more parameters"
    yield from sorted(f"    {path.relative_to(root)}: {getattr(node, 'name', '')}" for path, node in functions)
    layers, up = _layers(root), list[str]()
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        name = _module_of(root, path)
        imports = set(_imports(tree, inside_functions=True))
        if path.name != "__init__.py" and name.startswith("gptlite."):
            graph[name] = {_module_of(root, root / file) for each in imports if (file := _file_of(root, each))} - {name}
        here = layers.get(_package_of(name), 0) if name.startswith("gptlite.") else len(layers)
        rooms = {_package_of(each) for each in imports if each.startswith("gptlite.")}
        up += [f"    {path.relative_to(root)} imports {room}" for room in rooms if layers.get(room, 0) > here]
    yield f"{len(up)} imports go up across packages"
    yield from sorted(up)
    try:
        TopologicalSorter(graph).prepare()
        yield "no files import each other in a circle"
    except CycleError as error:
        yield f"files import each other in a circle: {' -> '.join(error.args[1])}"


def _package_of(module: str) -> str:
    return module.removeprefix("gptlite.").removeprefix("satellites.").partition(".")[0]


def _num_parameters(node: ast.AST) -> int:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    return sum(isinstance(each, ast.arg) and each.arg not in ("self", "cls") for each in ast.walk(node.args))


def _layers(root: Path) -> dict[str, int]:
    """Return `{package: layer}` from the table of the tests. Packages that it does not name one by one are lowest."""
    for node in ast.parse((root / LAYERS).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name("ROOMS")], value=ast.Dict(keys=keys)):
                names = [key.value for key in keys if isinstance(key, ast.Constant)]
                return {str(name): layer for layer, name in enumerate(names, 1)}
    return {}


def _module_of(root: Path, path: Path) -> str:
    relative = ".".join(path.relative_to(root).with_suffix("").parts)
    package = next((name for name, folder in BESIDE.items() if relative.startswith(f"{folder}.")), None)
    return relative if package is None else package + relative[len(BESIDE[package]) :]


def _row(name: str, files: dict[Path, int]) -> str:
    by_language: Counter[str] = Counter()
    for path, count in files.items():
        by_language[LANGUAGES[path.suffix]] += count
    # Empty files, such as an __init__.py, do not count as files.
    counts = "".join(f"{by_language[column] or '':>9}" for column in COLUMNS)
    return f"{name:<34}{sum(map(bool, files.values())):>7}{counts}".rstrip()


def _largest(files: dict[Path, int], what: str) -> Iterator[str]:
    python = [count for path, count in files.items() if path.suffix == ".py" and count]
    median = f" (median Python file: {statistics.median(python):.0f} lines)" if python else ""
    yield f"largest {what}{median}"
    ranked = sorted(files.items(), key=lambda item: (-item[1], item[0]))
    for index, (path, count) in enumerate(ranked):
        if index < LARGEST or count > LIMIT:
            yield f"{count:>7}  {path.as_posix()}" + (f"  <- over {LIMIT}: split it" if count > LIMIT else "")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("usage: python tools/size.py")
    print(report(ROOT))
