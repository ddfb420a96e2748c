"""tools/faults.py: the faults that it plants, and its verdicts on a small tree."""

import ast
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gptlite.config.schema import CONF_DIR
from gptlite.errors import ConfigError

TOOLS = CONF_DIR.parent / "tools"
PYTHON = '''
"""A docstring: 1 + 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1 < 2
__all__ = ["a" + "b"]
SIZE: "int | None" = 4


def speed(tokens: int, seconds: float = 1) -> float:
    """Tokens < seconds."""
    assert seconds > 0, "1 + 1"
    print(tokens + 1)
    self._log(f"{tokens + 1}")
    if (tokens) < (  # < in a comment
        seconds
    ) and not tokens:
        raise ValueError("1 < 2")
    state.tokens = list(tokens)[seconds:]
    return min(tokens, seconds)


class Box:
    def __init__(self):
        self.sides = True

    def __repr__(self):
        return 1 + 1
'''
CPP = """
// a < b
#define LEAST(a, b) (a < b)
template <class T, int lanes = 4>
static void scale(float* x, int64_t width) {
  for (int64_t at = 0; at < width; ++at) x[at] = fma(x[at], 2.5f, load<16>(x));
  sums[1] += width;
  CHECK(x, "a < b");  // 1
}
"""
PRODUCT = """
LEAST = 4


def larger(one, other):
    return one if one > other else other


def count(number):
    steps = 0
    while number > 0:
        number -= 1
        steps += 2
    return steps


def unused(number):
    return number - 2


def in_process(number):
    return number * 2
"""
TESTS = """
import subprocess
import sys

from gptlite.satellites.plan import cost


def test_larger():
    assert cost.larger(1, 2) == 2 == cost.larger(2, 1)


def test_count():
    assert cost.count(3) > 0


def test_process():
    program = "from gptlite.satellites.plan import cost; print(cost.__file__, cost.in_process(3))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()
    assert said == [cost.__file__, "6"]


def test_least():
    assert cost.LEAST == 4


def test_broken():
    assert cost.LEAST == 3
"""
PYPROJECT = """
[tool.pytest.ini_options]
addopts = "-q --import-mode=importlib -n logical"
"""


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def found(text: str, file: str = "gptlite/a.py") -> list[Any]:
    from fault_trials.cpp_faults import cpp_faults
    from fault_trials.python_faults import python_faults

    return (python_faults if file.endswith(".py") else cpp_faults)(file, text.encode())


def changed(text: str, file: str = "gptlite/a.py") -> set[str]:
    """The lines that faults put in place of others."""
    before = text.splitlines()
    results = [fault.apply(text.encode()).decode() for fault in found(text, file)]
    for result in results if file.endswith(".py") else ():
        ast.parse(result)
    return {line.strip() for result in results for line in result.splitlines() if line not in before}


def test_python_faults_change_code_but_no_text() -> None:
    assert changed(PYTHON) == {
        'SIZE: "int | None" = 5',
        'SIZE: "int | None" = 3',
        "def speed(tokens: int, seconds: float = 2) -> float:",
        "def speed(tokens: int, seconds: float = 0) -> float:",
        "if (tokens) <= (  # < in a comment",
        "if not ((tokens) < (  # < in a comment",
        ") and not tokens):",
        ") or not tokens:",
        ") and (tokens):",
        "pass",
        "state.tokens = list(tokens)[(seconds) + 1:]",
        "return None",
        "return tokens",
        "return max(tokens, seconds)",
        "self.sides = False",
    }


def test_cpp_faults_leave_comments_macros_and_templates() -> None:
    assert changed(CPP, "kernels/cpu/scale.cpp") == {
        "for (int64_t at = 1; at < width; ++at) x[at] = fma(x[at], 2.5f, load<16>(x));",
        "for (int64_t at = 0; at <= width; ++at) x[at] = fma(x[at], 2.5f, load<16>(x));",
        "sums[2] += width;",
        "sums[1] -= width;",
        ";",
    }


def test_a_fault_keeps_its_id_if_lines_move() -> None:
    moved = PYTHON.replace("\n\ndef speed", "\nOTHER = 7\n\n\ndef speed")
    before, after = ({fault.id: fault.line for fault in found(text)} for text in (PYTHON, moved))
    assert len(before) == len(found(PYTHON))
    assert {name: line + 2 for name, line in before.items() if line > 9}.items() <= after.items()


def test_draws_are_spread_and_repeatable(tmp_path: Path) -> None:
    from fault_trials.areas import draw, shares

    for name in ("a", "b", "c"):
        functions = "\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(20 if name == "a" else 10))
        (tmp_path / f"{name}.py").write_text(functions)
    areas = {"one": ("a.py",), "two": ("*.py",)}
    drawn = draw(tmp_path, 1, 20, areas)
    assert shares(list(areas), 21) == {"one": 11, "two": 10}
    first = {area: faults[:10] for area, faults in drawn.items()}
    assert first == {area: faults[:10] for area, faults in draw(tmp_path, 1, 20, areas).items()}
    assert first != {area: faults[:10] for area, faults in draw(tmp_path, 2, 20, areas).items()}
    assert [fault.file for fault in first["two"]].count("b.py") in range(3, 8)
    assert {fault.file for fault in first["two"]} == {"b.py", "c.py"}
    assert all(len({(fault.file, fault.function) for fault in faults}) == 10 for faults in first.values())


def test_a_fault_that_changes_no_instruction_is_left_out() -> None:
    from fault_trials.python_faults import same_code

    assert same_code(b"a = (1 + 2)", b"a = 1 + 2") is True
    assert same_code(b"a = 1", b"a = 2") is False
    assert same_code(b"a = 1", b"a = ") is None


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@localhost", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one area. Its last commit has a weaker test than the working tree."""
    from fault_trials import areas, run, session

    root = tmp_path / "checkout"
    files = {"gptlite/satellites/plan/cost.py": PRODUCT, "tests/plan/test_cost.py": TESTS, "pyproject.toml": PYPROJECT}
    files |= {
        "gptlite/__init__.py": "",
        "gptlite/satellites/plan/__init__.py": "",
        ".gitignore": ".pytest_cache\n__pycache__\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(dedent(text))
    (root / "tests/plan/test_cost.py").write_text(TESTS.replace("== 2 == cost.larger(2, 1)", "in (1, 2)"))
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "tests/plan/test_cost.py").write_text(TESTS)
    for module in (run, session):
        monkeypatch.setattr(module, "ROOT", root)
        monkeypatch.setattr(module, "AREAS", {"planner": ("gptlite/satellites/plan/*.py",)})
    monkeypatch.setattr(areas, "AREAS", {"planner": ("gptlite/satellites/plan/*.py",)})
    monkeypatch.setattr(session, "PRELOADED", ())
    return root


@pytest.fixture
def results(tree: Path, tmp_path: Path) -> Callable[..., dict[str, tuple[str, str | None]]]:
    """Tries faults of the tree, given as `old -> new`. Gives the verdict and the name of the test for each."""
    from fault_trials.areas import faults_of
    from fault_trials.run import Options, run

    def tried(name: str, *wanted: str, **options: Any) -> dict[str, tuple[str, str | None]]:
        faults = {f"{fault.old} -> {fault.new}": fault for fault in faults_of(tree, "gptlite/satellites/plan/cost.py")}
        records = [faults[each].record() | {"area": "planner", "verdict": "caught"} for each in wanted]
        given, out = tmp_path / "faults.jsonl", tmp_path / f"{name}.jsonl"
        given.write_text("\n".join(map(json.dumps, records)))
        assert run(Options(out=str(out), faults=str(given), jobs=1, **options)) == 0
        found = map(json.loads, out.read_text().splitlines())
        return {f"{each['old']} -> {each['new']}": (each["verdict"], each["by"]) for each in found}

    return tried


@pytest.mark.slow
def test_verdicts(results: Callable[..., Any], tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    test = "tests/plan/test_cost.py::test_"
    expected = {
        "LEAST = 4 -> LEAST = 5": ("caught", f"{test}least"),
        "one if one > other else other -> one if not (one > other) else other": ("caught", f"{test}larger"),
        "return number * 2 -> return number + 2": ("caught", f"{test}process"),
        "steps += 2 -> steps += 3": ("not caught", None),
        "return number - 2 -> return number + 2": ("not reached", None),
    }
    assert results("here", *expected) == expected
    assert capsys.readouterr().err.count("fails without a fault: tests/plan/test_cost.py::test_broken\n") == 2
    larger = list(expected)[1]
    assert results("before", larger, tests="HEAD") == {larger: ("not caught", None)}
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before


def test_a_run_that_hangs_or_crashes_ends_with_all_its_processes(tree: Path) -> None:
    from fault_trials.session import workers

    child = "import subprocess, time; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    with workers(tree, 1, None) as (worker,):
        status, output = worker.execute(f"{child}; time.sleep(60)", limit=1)
        assert status is None
        assert not Path(f"/proc/{output.strip()}").exists()
        status, output = worker.execute(f"{child}; 1 / 0")
        assert status == 70
        assert not Path(f"/proc/{output.splitlines()[0]}").exists()
        folder = worker.copy.folder
        assert "import gptlite" not in (folder / "server.log").read_text()
    assert not folder.exists()


@pytest.mark.parametrize(("status", "why"), [(None, "time limit"), (-11, "exit code -11: it crashed")])
def test_the_test_that_hangs_or_crashes_catches_the_fault(status: int | None, why: str, tmp_path: Path) -> None:
    from fault_trials.worker import _outcome

    events = [
        {"kind": "start", "name": "a"},
        {"kind": "end", "name": "a", "seconds": 1},
        {"kind": "start", "name": "b"},
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    (tmp_path / "output.txt").write_text("it crashed\n")
    outcome = _outcome(tmp_path, {"status": status, "processor_seconds": 2.0}, ["file"])
    assert (outcome.caught, outcome.why, outcome.seconds) == ("b", why, {"a": 1})


def measured(file: str, tests: dict[str, float], lines: dict[str, dict[str, set[int]]]) -> Any:
    from fault_trials.coverage_map import TestFile

    return TestFile(file, "", sum(tests.values()), tests, lines, ())


def test_tests_that_reach_the_statement_come_first(tmp_path: Path) -> None:
    from fault_trials.choose import batches
    from fault_trials.coverage_map import CoverageMap

    file = "gptlite/satellites/plan/cost.py"
    fault = next(each for each in found("def f(a):\n    return a + 1\n", file) if each.operator == "arithmetic")
    here = {file: {1, 2}}
    known = CoverageMap(tmp_path)
    for each in (
        measured("tests/plan/test_b.py", {"b::1": 30.0, "b::2": 1.0}, {"b::1": here}),
        measured("tests/data/test_c.py", {"c::1": 5.0, "c::2": 3.0, "c::3": 1.0}, {"c::1": here, "c::2": here}),
        measured("tests/data/test_d.py", {"d::1": 4.0}, {"d::1": here}),
        measured("tests/data/test_e.py", {"e::1": 1.0}, {"": here}),
    ):
        known.add(each)
    order = [batch.names for batch in batches(fault, known, {"d::2"})]
    assert order == [["b::1"], ["c::2", "c::1", "d::1"], ["b::2", "c::3"]]
    assert [batch.names for batch in batches(fault, known, {"b::1", "c::2"})] == [["d::1", "c::1"], ["b::2", "c::3"]]
    again = CoverageMap(tmp_path)
    again.load(tmp_path)  # the test files do not exist
    assert again.files == {}


@pytest.mark.parametrize(
    ("file", "test_file", "near"),
    [
        ("gptlite/satellites/plan/cost.py", "tests/plan/test_cost.py", True),
        ("gptlite/models/gpt/model.py", "tests/models/test_gpt.py", True),
        ("gptlite/files.py", "tests/test_files.py", True),
        ("gptlite/checkpoint/find.py", "tests/checkpoint_tool/test_boxes.py", False),
        ("gptlite/satellites/checkpoint_tool/ls.py", "tests/tools/test_checkpoint_tool.py", True),
        ("kernels/cpu/rope.cpp", "tests/kernels/test_rope.py", True),
    ],
)
def test_the_mirrored_folder(file: str, test_file: str, near: bool) -> None:
    from fault_trials.choose import is_near

    assert is_near(file, test_file) is near


def test_a_run_continues_where_it_was_stopped(tmp_path: Path) -> None:
    from fault_trials.run import remaining
    from fault_trials.trials import Queue, read_records

    faults = found("def f(a):\n    return (a + 1, a + 2, a + 3, a + 4)\n")
    one, two, three, *more = [fault for fault in faults if fault.operator == "arithmetic"]
    results = tmp_path / "results"
    records = [one.record() | {"verdict": "caught"}, two.record() | {"verdict": "no effect"}]
    results.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"file": "gptl')
    pending = {"area": [one, two, three, *more]}
    left = remaining(pending, {"area": 2}, read_records(results))
    assert left == ({"area": [three, *more]}, {"area": 1})
    assert Queue(*left).total == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"areas": "plan"}, "areas=plan: plan is not one of configuration, "),
        ({"faults": "a", "uncaught": "b"}, "faults and uncaught exclude each other"),
        ({"faults": "nowhere.jsonl"}, "faults=nowhere.jsonl does not exist"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    from fault_trials.run import Options, chosen

    with pytest.raises(ConfigError, match=message):
        chosen(tmp_path, Options(out="a", **options))
