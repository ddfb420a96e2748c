"""Tests that loop over cases: every case runs, and those that fail are named."""

import pytest

from kernels.loop import LoopValues, cases_of, columns, loop_count, loop_over, run_all


def test_cases_are_all_combinations_of_groups_whose_arguments_change_together() -> None:
    sizes, dtypes = columns("size,dtype", [((1, 2), "fp32"), ((3, 4), "bf16")])
    (scales,) = columns("scale", [0.5, 2.0])
    found = cases_of({"size": sizes, "backend": "best", "dtype": dtypes, "scale": scales})
    assert [(name, *case.values()) for name, case in found] == [
        ("(1, 2)-fp32-0.5", (1, 2), "best", "fp32", 0.5),
        ("(1, 2)-fp32-2.0", (1, 2), "best", "fp32", 2.0),
        ("(3, 4)-bf16-0.5", (3, 4), "best", "bf16", 0.5),
        ("(3, 4)-bf16-2.0", (3, 4), "best", "bf16", 2.0),
    ]


def test_the_number_of_cases_is_known() -> None:
    @loop_over("width", [1, 2, 3])
    @loop_over("size,dtype", [(1, "fp32"), (2, "bf16")])
    def test() -> None: ...

    assert loop_count(test) == 6
    (first, _) = test.pytestmark  # type: ignore[attr-defined]
    assert first.args[1][0].values == (LoopValues("size,dtype", (1, 2)), LoopValues("size,dtype", ("fp32", "bf16")))


def test_every_case_runs_and_each_failure_is_named() -> None:
    ran = []

    def test(width: int) -> None:
        ran.append(width)
        assert width != 2, "two"
        if width == 4:
            pytest.skip("four")
        assert width < 5

    with pytest.raises(ExceptionGroup, match=r"^2 of 5 cases fail: 2, 5$") as failed:
        run_all(test, list(cases_of({"width": columns("width", [1, 2, 3, 4, 5])[0]})))
    assert ran == [1, 2, 3, 4, 5]
    assert [error.__notes__ for error in failed.value.exceptions] == [["case 2"], ["case 5"]]


@loop_over("width", [1, 2, 3])
def test_pytest_runs_the_cases(width: int) -> None:
    assert width in (1, 2, 3)


@loop_over("width", [1, 2, 3])
@pytest.mark.xfail(raises=ExceptionGroup, strict=True)
def test_pytest_sees_that_a_case_fails(width: int) -> None:
    assert width != 2


def test_a_test_is_skipped_if_all_its_cases_are() -> None:
    with pytest.raises(pytest.skip.Exception, match="none here"):
        run_all(lambda width: pytest.skip("none here"), list(cases_of({"width": columns("width", [1, 2])[0]})))
