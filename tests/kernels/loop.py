"""One test for many cases: pytest takes longer to run a test than most kernels take.

    @loop_over("dtype", DTYPES)
    @loop_over("width", [6, 65, 1030])
    def test_sums(dtype, width): ...  # nine cases, and one test

All cases run, and the failure of a test has every failing case by name. In a folder whose conftest.py imports
`pytest_pyfunc_call`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class LoopValues:
    """The values of an argument, one for each case. Arguments of the same `group` change together."""

    group: str
    values: tuple[Any, ...]


def columns(names: str, cases: Iterable[Any]) -> list[LoopValues]:
    """An argument's values for each of the names; a case is a tuple, or a single value of a single name."""
    rows = [case if "," in names else (case,) for case in cases]
    return [LoopValues(names, column) for column in zip(*rows, strict=True)]


def loop_over(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run the test on these cases, and on all their combinations with those of other `loop_over`."""
    cases = list(cases)

    def looped(test: Test) -> Test:
        test.loop_count = loop_count(test) * len(cases)  # type: ignore[attr-defined]
        return pytest.mark.parametrize(names, [pytest.param(*columns(names, cases), id=names)])(test)

    return looped


def loop_count(test: Callable[..., object]) -> int:
    """Return the number of combinations that `loop_over` has given a test so far."""
    return getattr(test, "loop_count", 1)


def cases_of(arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of each case."""
    groups: dict[str, list[str]] = {}
    for name, value in arguments.items():
        if isinstance(value, LoopValues):
            groups.setdefault(value.group, []).append(name)
    rows: list[list[dict[str, Any]]] = []
    for names in groups.values():
        values = zip(*(arguments[name].values for name in names), strict=True)
        rows.append([dict(zip(names, row, strict=True)) for row in values])
    for parts in itertools.product(*rows):
        case = {name: value for part in parts for name, value in part.items()}
        yield "-".join(map(name_of, case.values())), arguments | case


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value)).removeprefix("torch.")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on each of its cases."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if not any(isinstance(value, LoopValues) for value in arguments.values()):
        return None
    run_all(pyfuncitem.obj, list(cases_of(arguments)))
    return True


def run_all(test: Callable[..., object], cases: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Run all cases. Raise an ExceptionGroup that names those that fail; skip if all are skipped."""
    errors: dict[str, Exception] = {}
    skipped: list[pytest.skip.Exception] = []
    for name, arguments in cases:
        if "backend" in arguments:
            arguments["backend"] = arguments["backend"].of_case(name)
        try:
            test(**arguments)
        except pytest.skip.Exception as reason:
            skipped.append(reason)
        except Exception as error:
            error.add_note(f"case {name}")
            errors[name] = error
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(cases)} cases fail: {', '.join(errors)}", list(errors.values()))
    if len(skipped) == len(cases):
        raise skipped[0]
