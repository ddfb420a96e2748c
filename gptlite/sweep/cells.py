"""The cells of a sweep: which they are, what each is called, and which of them are legal. No torch here."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gptlite.config import typed
from gptlite.config_errors import refusals
from gptlite.errors import ConfigError

OURS = "."  # hydra.sweep.subdir, where the folder of a cell is `<number>-<what differs>`
LONGEST = 100  # signs of a folder's name


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. `name` is what differs, `digest` of the configuration but for its names and folders."""

    number: int
    name: str
    overrides: tuple[str, ...]
    run_dir: Path
    digest: str
    refusal: str = ""  # why it cannot run


def swept_keys(loader: ConfigLoader, overrides: list[str]) -> list[str]:
    """The keys that have several values, in the order given. Raises ConfigError."""
    with refusals():
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
    return [each.get_key_element().lstrip("+") for each in parsed if each.is_sweep_override()]


def all_overrides(config: DictConfig) -> list[str]:
    """Of a sweep: those in `hydra.sweeper.params`, and the command line's, which win."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    return [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]


def combinations(loader: ConfigLoader, overrides: list[str]) -> list[list[str]]:
    """The overrides of each cell, as Hydra's own sweeper will number them. Raises ConfigError."""
    with refusals():
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
        (batch,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return batch


def checked_cells(loader: ConfigLoader, config: DictConfig, swept: Sequence[str], world: bool) -> list[Cell]:
    """All cells, composed and checked. Raises ConfigError for what is wrong with the sweep: a misspelled key, say.

    `world`: check also what depends on this machine, as far as it can be told before a rank starts.
    """
    singleton, cells = HydraConfig.instance(), []
    before = singleton.cfg
    try:
        for number, overrides in enumerate(combinations(loader, all_overrides(config))):
            with refusals():
                raw = loader.load_sweep_config(config, overrides)
            with open_dict(raw):
                raw.hydra.job.num, raw.hydra.job.id = number, number
            singleton.set_config(raw)
            with refusals():
                task = _without_hydra(raw)
                cell = this_cell(raw.hydra, task, swept)
            try:
                prepare(task, cell)
                settle(task, world)
            except ConfigError as error:
                cell = replace(cell, refusal=str(error))
            cells.append(cell)
    finally:
        singleton.cfg = before
    _refuse_shared_folders(cells)
    if all(cell.refusal for cell in cells):
        count = f"none of the {len(cells)} cells can run; the first: " if len(cells) > 1 else ""
        raise ConfigError(f"{count}{cells[0].refusal}")
    return cells


def this_cell(hydra: Any, raw: DictConfig, swept: Sequence[str]) -> Cell:
    """The cell of a composed configuration and its `hydra` section, the one whose job is running or checked."""
    number, overrides = int(hydra.job.num), list(hydra.overrides.task)
    differing = [each for each in overrides if each.partition("=")[0].lstrip("+") in swept]
    name = " ".join(map(_label, differing)) or str(number)
    subdir = str(hydra.sweep.subdir)
    if subdir == OURS:
        subdir = "-".join([str(number), *map(_file_name, differing)])[:LONGEST].rstrip("-.")
    return Cell(number, name, tuple(overrides), Path(str(hydra.sweep.dir), subdir), _digest(raw))


def prepare(raw: DictConfig, cell: Cell) -> None:
    """Gives a composed configuration the cell's folder and name, and the sweep's name as its group in W&B."""
    sweep = cell.run_dir.parent.resolve().name
    named = any(override.startswith("run.name=") for override in cell.overrides)
    raw.run.dir = str(cell.run_dir)
    raw.run.name = f"{raw.run.name if named else sweep}-{cell.run_dir.name}"
    if "group" in raw.logger and raw.logger.group is None:
        raw.logger.group = sweep


def settle(raw: DictConfig, world: bool) -> None:
    """Raises ConfigError where a configuration cannot run."""
    config = typed(raw)
    if world:
        from gptlite.launch import planned

        planned(config, None)


def _refuse_shared_folders(cells: Sequence[Cell]) -> None:
    owners: dict[Path, int] = {}
    for cell in cells:
        if (other := owners.setdefault(cell.run_dir, cell.number)) != cell.number:
            raise ConfigError(
                f"hydra.sweep.subdir gives cells {other} and {cell.number} the same folder, {cell.run_dir}; "
                "put ${hydra.job.num} into it, or leave it out"
            )


def _label(override: str) -> str:
    """`tensor=2` of `parallelism.tensor=2`, and `zero1` of `parallelism=zero1`."""
    key, _, value = override.lstrip("+").partition("=")
    return f"{key.rpartition('.')[2]}={value}" if "." in key or "/" in key or not re.match(r"[a-z]", value) else value


def _file_name(override: str) -> str:
    """The same without signs that a shell or Hydra would read."""
    key, _, value = _label(override).rpartition("=")
    value = re.sub(r"[^\w.+-]+", "_", value).strip("_")
    return f"{key}{'' if not key or value[:1].isdigit() else '_'}{value}"


def _digest(raw: DictConfig) -> str:
    """Of the resolved configuration, whatever the run is called, wherever it lies and what the planner knows."""
    content: Any = OmegaConf.to_container(raw, resolve=True, enum_to_str=True)
    for section in ("run", "cluster"):
        content.pop(section, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _without_hydra(config: DictConfig) -> DictConfig:
    """What a job is handed of a composed configuration."""
    result = copy.deepcopy(config)
    with read_write(result), open_dict(result):
        del result["hydra"]
    return result
