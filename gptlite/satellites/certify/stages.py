"""All stages of a certificate, one after the other."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from gptlite.config.saved import to_dict
from gptlite.config.schema import Config, model_name
from gptlite.cpu import cpu_name
from gptlite.ops.select import select_ops
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import resolve
from gptlite.progress import Log, Progress, counted, working
from gptlite.satellites.certify import sources
from gptlite.satellites.certify.certificate import VERSION, Certificate, seal
from gptlite.satellites.certify.equal import check_parity
from gptlite.satellites.certify.match import resolved
from gptlite.satellites.certify.owned import check_state
from gptlite.satellites.certify.reduction import ReducedRuns, reduce
from gptlite.satellites.certify.resume import check_resume
from gptlite.satellites.certify.rows import StageRow
from gptlite.satellites.certify.typed import check_types

LIVES = 6  # runs of the stage `resume`


def certify(config: Config, world: int, tell: Callable[[str], None], log: Log) -> Certificate:
    """Check a configuration on `world` ranks, and return its certificate.

    `tell` receives the row of each stage, and `log` lines of progress. Raises ConfigError if it cannot be reduced.
    """
    began = time.monotonic()
    config = resolved(config, world)
    layout = resolve(config.parallelism, world).describe(config.parallelism)
    with working("certify: reducing the layout, preparing ops", log):
        reduction = reduce(config, world)
        # Raises before a rank starts if an op cannot run, and compiles the kernels once, not in every rank.
        select_ops(config.ops, torch.device("cpu"), documents=config.data.documents)
    tell(f"{model_name(config.model)}, {layout}: {counted(world, 'rank')}")
    rows: list[StageRow] = []

    def passed(check: Callable[[], StageRow]) -> None:
        started = time.monotonic()
        row = replace(check(), seconds=time.monotonic() - started)
        rows.append(row)
        tell("\n".join([row.line(), *(f"           {line}" for line in row.details)]))

    with tempfile.TemporaryDirectory(prefix="gptlite-certify-") as name:
        folder = Path(name)
        reduction = _with_files(reduction, folder)
        progress = Progress("certify", 2 + len(reduction.worlds) + LIVES, log, unit="runs")

        def done() -> None:
            progress.add(1)

        with working("certify: checking the types", log):
            passed(lambda: check_types(config, world, folder))
        done()
        passed(lambda: check_parity(reduction, folder, done))
        resumed = []
        passed(lambda: resumed.append(check_resume(reduction, folder, config.seed, done)) or resumed[0].row)
        passed(lambda: check_state(reduction.base, resumed[0].whole, resumed[0].single))
    return sealed(config, world, reduction, rows, time.monotonic() - began)


def _with_files(reduction: ReducedRuns, folder: Path) -> ReducedRuns:
    """Return the reduction with the files of offloaded state in a folder of this machine."""
    layout = reduction.source
    if layout.offload is not Offload.nvme:
        return reduction
    (folder / "offload").mkdir()
    path = str(folder / "offload")
    worlds = [replace(each, parallelism=replace(each.parallelism, offload_path=path)) for each in reduction.worlds]
    return replace(reduction, source=replace(layout, offload_path=path), worlds=tuple(worlds))


def sealed(config: Config, world: int, reduction: ReducedRuns, rows: list[StageRow], seconds: float) -> Certificate:
    """Return the certificate of a configuration whose data degree is set."""
    saved = to_dict(config)
    return Certificate(
        schema_version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        name=name_of(config, world),
        model=model_name(config.model),
        layout=resolve(config.parallelism, world).describe(config.parallelism),
        world_size=world,
        passed=all(row.passed is not False for row in rows),
        overrides=list(config.run.overrides),
        config=saved,
        config_digest=seal(saved),
        model_digest=sources.model_digest(config),
        gptlite_digest=sources.gptlite_digest(),
        versions=sources.versions(config),
        machine=cpu_name() or "an unknown CPU",
        commit=sources.commit(Path.cwd()),
        seed=config.seed,
        axes={axis.name: [axis.true, axis.degree] for axis in reduction.axes},
        worlds=[f"{reduction.describe(each)}: {counted(each.ranks, 'rank')}" for each in reduction.worlds],
        reduced={key: list(pair) for key, pair in reduction.model.changed.items()},
        blocks=None if reduction.model.blocks is None else list(reduction.model.blocks),
        rows=[asdict(row) | {"details": list(row.details), "uncovered": list(row.uncovered)} for row in rows],
        uncovered=[*reduction.uncovered, *(line for row in rows for line in row.uncovered)],
        seconds=seconds,
    )


def name_of(config: Config, world: int) -> str:
    """Return the name of a certificate's folder, e.g. `gpt-lite-modern-pp4-tp4-dp16-zero2`."""
    layout = resolve(config.parallelism, world)
    degrees = {"pp": layout.size("pp"), "tp": layout.size("tp"), "cp": layout.context, "ep": config.parallelism.expert}
    degrees |= {"dp": layout.data_size, "zero": config.parallelism.zero}
    least = {"zero": 0}
    words = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > least.get(axis, 1)]
    text = "-".join([model_name(config.model).lower(), *words])
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in text)
