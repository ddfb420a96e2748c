"""When a sweep's reports are written: after each cell, and at its end. A report that fails stops nothing."""

from __future__ import annotations

from gptlite.sweep.folder import SweepFolder

REPORTS = ".reports"


def publish(folder: SweepFolder, final: bool) -> None:
    """sweep.json, the table on the terminal, and what stands beside sweep.json; with `final`, pictures too."""
    from gptlite.sweep.report import table, write_reports

    records = folder.update()
    if not records:
        return
    try:
        if final or len(records) != folder.header.get("cells"):  # else it is the next thing said
            print(f"\n{table(records)}", flush=True)
        with folder.alone(REPORTS):
            write_reports(folder.path, records, print, final=final)
    except Exception as error:  # of a thousand cells' results none is lost for a picture of them
        print(f"warning: no report of the sweep: {type(error).__name__}: {error}", flush=True)
