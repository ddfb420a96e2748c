"""Table of what finds each fault: `cd tests && python -m distributed.cells.faults_page ../docs/certify_faults.md ROWS`.

Plants every fault in turn (about ten minutes on two cores), and rewrites the table of the page between its marks. The
file ROWS keeps what is done, so that a run that was stopped goes on.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import torch

from distributed.cells.compare import Pool, References
from distributed.cells.faults import Findings, cell_of, fault_planted, faults
from distributed.cells.public_faults import REPORTS
from distributed.cells.run import run_ranks
from gptlite.config import load

BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
WAYS = ("types", "parity", "copies", "resume")


def found_by_types(fault: str) -> str:
    """In a process of its own: what the check of types says of a fault's layout; empty: nothing."""
    from gptlite.satellites.certify.types.check import check_types
    from gptlite.satellites.certify.types.declared import declarations

    cell, declared = cell_of(fault), declarations()  # a fault may replace a function with its declaration
    with fault_planted(fault):
        report = check_types(load(cell.overrides()), cell.world, declared)
    return "" if report.passed else report.message


def findings(pool: Pool, fault: str) -> dict[str, str]:
    """Return what each way of looking says of a fault, by the names of WAYS."""
    cell = cell_of(fault)
    reference, apart = pool.references.of(cell, 2)
    arguments = (load(cell.overrides()), reference, apart, fault)
    ranks: Findings = pool.ranks(cell.world).run("distributed.cells.faults:look", *arguments, timeout=600)[0]
    types = run_ranks(1, "distributed.cells.faults_page:found_by_types", fault, timeout=600)[0]
    return {"types": types, **vars(ranks)}


def page(rows: dict[str, dict[str, str]]) -> str:
    """Return the tables of the page for the findings of all faults."""
    counts = ", ".join(f"{way} {sum(bool(row[way]) for row in rows.values())}" for way in WAYS)
    together = sum(any(row.values()) for row in rows.values())
    lines = [f"Of {len(rows)} faults: {counts}; together {together}.", ""]
    mutations = {name: row for name, row in rows.items() if name not in {report.fault for report in REPORTS}}
    lines += ["| reported | what was wrong | analogue | " + " | ".join(WAYS) + " |", "|---|---|---|" + ":-:|" * 4]
    for report in REPORTS:
        marks = _marks(rows[report.fault]) if report.fault else ["", *("" for _ in WAYS[1:])]
        lines.append(" | ".join([f"| {report.report}", report.was, report.fault or report.none, *marks]) + " |")
    lines += ["", "| mutation | " + " | ".join(WAYS) + " | first difference |", "|---|" + ":-:|" * 4 + "---|"]
    for name, row in mutations.items():
        first = row["parity"].removeprefix("different: step 1: ").partition(" is off")[0]
        lines.append(" | ".join([f"| {name}", *_marks(row), first]) + " |")
    return "\n".join(lines)


def _marks(row: dict[str, str]) -> list[str]:
    return ["yes" if row[way] else "-" for way in WAYS]


def main(path: Path, done: Path) -> None:
    """Plant every fault and rewrite the page."""
    torch.set_num_threads(1)
    known = dict(map(json.loads, done.read_text().splitlines())) if done.exists() else {}
    rows: dict[str, dict[str, str]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Pool(References(Path(folder)))) as pool,
        done.open("a") as out,
    ):
        for fault in faults():
            rows[fault] = known.get(fault) or findings(pool, fault)
            print(json.dumps([fault, rows[fault]]), file=out, flush=True) if fault not in known else None
            print(f"{fault}: {', '.join(way for way in WAYS if rows[fault][way]) or 'NOTHING'}", flush=True)
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{page(rows)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
