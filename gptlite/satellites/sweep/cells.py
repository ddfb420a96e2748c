"""Cells of a sweep: numbers, names, folders, and checks of their configurations. Does not import torch."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gptlite import limits
from gptlite.config.compose import typed
from gptlite.config.hydra_private import combinations_of
from gptlite.config.messages import refusals
from gptlite.config.overrides import key_of
from gptlite.config.schema import CONF_DIR
from gptlite.errors import ConfigError
from gptlite.progress import Progress
from gptlite.satellites.sweep.folder import PRUNED, Record

OURS = "."  # default of hydra.sweep.subdir, for which a cell's folder is `<number>-<differing overrides>`
ALONE = "hydra.mode=RUN"  # has a configuration that chooses a sweep run as a single run
LONGEST = 100  # characters in a folder's name


def parsed_overrides(loader: ConfigLoader, config: DictConfig) -> list[Override]:
    """Return the overrides of `hydra.sweeper.params`, then those of the command line, which take precedence.

    Raises ConfigError if one cannot be parsed.
    """
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    with refusals():
        return OverridesParser.create(config_loader=loader).parse_overrides(
            [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
        )


def swept_keys(overrides: Sequence[Override]) -> list[str]:
    """Return the keys that have several values, in the order of the overrides."""
    return [each.get_key_element().lstrip("+") for each in overrides if each.is_sweep_override()]


def checked_cells(loader: ConfigLoader, config: DictConfig, overrides: list[Override], world: bool) -> list[Record]:
    """Return all cells, composed and numbered from 0 as by Hydra's default sweeper. A cell that cannot run or
    repeats another is pruned.

    With `world`, each cell is also checked against this machine's GPUs, memory and disks. Raises ConfigError for an
    error of the whole sweep, such as a misspelled key, or if no cell can run.
    """
    singleton, cells = HydraConfig.instance(), []
    before = singleton.cfg
    try:
        with refusals():
            _refuse_many(overrides)
            combinations = combinations_of(overrides)
        progress = Progress("checking", len(combinations), print, unit="cells")
        for number, each in enumerate(combinations):
            with refusals():
                raw = loader.load_sweep_config(config, each)
                with open_dict(raw):
                    raw.hydra.job.num, raw.hydra.job.id = number, number
                singleton.set_config(raw)  # `${hydra:...}` in a configuration resolves against the singleton
                task = copy.deepcopy(raw)
                with read_write(task), open_dict(task):
                    del task["hydra"]  # as Hydra does before it calls the job
                cell = this_cell(raw.hydra, task, swept_keys(overrides))
            cells.append(_checked(task, cell, world))
            progress.add(1)
    finally:
        singleton.cfg = before
    owners: dict[str, int] = {}
    first: dict[tuple[str, ...], Record] = {}
    for cell in cells:
        if (same := first.setdefault(tuple(cell.overrides), cell)) is not cell and cell.status != PRUNED:
            cell.status, cell.reason = PRUNED, f"the same overrides as {same.title}"
        if (other := owners.setdefault(cell.run_dir, cell.number)) != cell.number:
            raise ConfigError(
                f"hydra.sweep.subdir gives cells {other + 1} and {cell.number + 1} the same folder, {cell.run_dir}; "
                "include ${hydra.job.num} in it, or leave it out"
            )
    if all(cell.status == PRUNED for cell in cells):
        count = f"none of the {len(cells)} cells can run; the first one: " if len(cells) > 1 else ""
        raise ConfigError(f"{count}{cells[0].reason}")
    return cells


def _refuse_many(overrides: Sequence[Override]) -> None:
    """Raise ConfigError for more cells than are accepted, before a range of billions of values is expanded."""
    count, largest = 1, ("", 1)
    for override in overrides:
        value = override.value()
        if isinstance(value, RangeSweep):
            start, stop = (float(each) if each is not None else math.inf for each in (value.start, value.stop))
            steps = (stop - start) / value.step if value.step else math.inf
            size = max(0, math.ceil(steps)) if abs(steps) <= limits.INTEGER else limits.INTEGER
        else:
            size = len(value.list) if isinstance(value, ChoiceSweep) else 1
        count, largest = count * size, max(largest, (override.input_line or "", size), key=itemgetter(1))
    if count > limits.CELLS:
        raise ConfigError(f"{largest[0]}: the sweep has {count:,} cells, more than {limits.CELLS:,}; give fewer values")


def this_cell(hydra: Any, raw: DictConfig, swept: Sequence[str]) -> Record:
    """Return the cell of a composed configuration `raw` and its `hydra` section, with an empty status.

    `swept` are the keys that have several values. The cell is named after its values of these keys.
    """
    number, overrides = int(hydra.job.num), list(hydra.overrides.task)
    differing = [each for each in overrides if key_of(each) in swept]
    name = " ".join(map(_label, differing)) or str(number)
    subdir = str(hydra.sweep.subdir)
    if subdir == OURS:
        subdir = "-".join([str(number), *map(_file_name, differing)])[:LONGEST].rstrip("-.")
    content: Any = OmegaConf.to_container(raw, resolve=True, enum_to_str=True)
    for section in ("run", "cluster"):  # paths, names and the planner's cluster do not change a run's results
        content.pop(section, None)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return Record(number, name, overrides, "", run_dir=str(Path(str(hydra.sweep.dir), subdir)), digest=digest)


def alone(overrides: Sequence[str]) -> list[str]:
    """Return a cell's overrides such that they compose the cell instead of starting its sweep again."""
    # gptlite's sweep presets have only keys of Hydra's sweeper; those of others may have keys of the run.
    ours = {f"+sweep={each.stem}" for each in (CONF_DIR / "sweep").glob("*.yaml")}
    kept = [each for each in overrides if each not in ours]
    sweeping = any(each.startswith(("+sweep=", "experiment=")) for each in kept)
    return [*kept, *([ALONE] if sweeping and ALONE not in kept else [])]


def prepare(raw: DictConfig, cell: Record) -> None:
    """Set the run folder and name in a cell's composed configuration, and the W&B group to the sweep's name."""
    run_dir = Path(cell.run_dir)
    sweep = run_dir.parent.resolve().name
    named = any(override.startswith("run.name=") for override in cell.overrides)
    raw.run.dir = cell.run_dir
    raw.run.name = f"{raw.run.name if named else sweep}-{run_dir.name}"
    if "group" in raw.logger and raw.logger.group is None:
        raw.logger.group = sweep


def _checked(raw: DictConfig, cell: Record, world: bool) -> Record:
    """Return the cell, with status `pruned` and the reason if its configuration is refused."""
    try:
        prepare(raw, cell)
        config = typed(raw, cell.overrides)
        if world:
            from gptlite.start.run import settled

            settled(config, None)
    except ConfigError as error:
        cell.status, cell.reason = PRUNED, str(error)
    return cell


def _parts(override: str) -> tuple[str, str]:
    """Return `tensor` and `2` for `parallelism.tensor=2`; an empty key and `zero1` for `parallelism=zero1`."""
    key, _, value = override.lstrip("+").partition("=")
    named = "." in key or "/" in key or not re.match(r"[a-z]", value)
    return key.rpartition(".")[2] if named else "", value


def _label(override: str) -> str:
    """Return `tensor=2` for `parallelism.tensor=2`, and `zero1` for `parallelism=zero1`."""
    key, value = _parts(override)
    return f"{key}={value}" if key else value


def _file_name(override: str) -> str:
    """Return the label as part of a file name, without characters that are special to a shell or to Hydra."""
    key, value = _parts(override)
    key = key.replace("/", "_")
    value = re.sub(r"[^\w.+-]+", "_", value).strip("_")
    return f"{key}{'' if not key or value[:1].isdigit() else '_'}{value}"
