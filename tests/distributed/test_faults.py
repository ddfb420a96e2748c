"""Every fault, planted on every rank, is found: analogues of public ones, and mutations of collectives."""

from pathlib import Path

import pytest
from marking import marked

from distributed.cells.compare import Pool
from distributed.cells.faults import BUGS, MUTATIONS, faults
from distributed.cells.faults_page import WAYS, findings, page
from distributed.cells.mutations import PLACES, SUMS, drawn
from distributed.cells.public_faults import REPORTS

PAGE = Path(__file__).parents[2] / "docs" / "certify_faults.md"


@pytest.mark.parametrize("fault", marked(faults(), slow=14))
def test_a_fault_is_found(fault: str, pool: Pool) -> None:
    found = findings(pool, fault)
    assert any(found.values())
    assert {way for way in WAYS if found[way]} == on_the_page()[fault]


def on_the_page() -> dict[str, set[str]]:
    """The ways that find each fault, by docs/certify_faults.md."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    names = {*faults()}
    return {
        cell: {way for way, mark in zip(WAYS, row[index + 1 :], strict=False) if mark == "yes"}
        for row in rows
        for index, cell in enumerate(row)
        if cell in names
    }


def test_the_page_has_every_fault() -> None:
    assert {*on_the_page()} == {*faults()}
    for report in REPORTS:
        assert report.report in PAGE.read_text()


def test_forty_mutations_reach_every_place_and_kind() -> None:
    names = drawn()
    assert len({*names}) == 40
    assert {MUTATIONS[name].place for name in names} == {*PLACES}
    assert {MUTATIONS[name].kind for name in names} == {*SUMS}
    assert drawn() == names != drawn(seed=1)


def test_every_report_has_an_analogue_or_a_reason() -> None:
    for report in REPORTS:
        assert bool(report.fault) != bool(report.none)
        assert not report.fault or report.fault in BUGS or report.fault in MUTATIONS


def test_the_page_counts_what_it_shows() -> None:
    rows = {name: {way: "x" if way == "parity" else "" for way in WAYS} for name in faults()}
    rows[faults()[0]] = dict.fromkeys(WAYS, "")
    assert page(rows).startswith(f"Of {len(rows)} faults: types 0, parity {len(rows) - 1}, ")
    assert f"together {len(rows) - 1}." in page(rows)
