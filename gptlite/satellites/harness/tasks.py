"""Evaluation with lm-eval's tasks, with a table and a file of the results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from gptlite.errors import ConfigError, did_you_mean, one_line
from gptlite.files import write_whole
from gptlite.satellites.harness.lm import GptliteLM


@dataclass(frozen=True)
class Tasks:
    """Names of tasks, and options for lm-eval. `folder` has YAML files of additional tasks."""

    names: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    folder: str | None = None


def run_tasks(lm: GptliteLM, tasks: Tasks) -> dict[str, Any]:
    """Return lm-eval's results. Raises ConfigError for an unknown task, and for a task whose data cannot be loaded."""
    manager = TaskManager(include_path=tasks.folder, include_defaults=tasks.folder is None)
    if not set(tasks.names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=tasks.folder)  # reads the thousands of files of lm-eval's own tasks
    known = manager.all_tasks
    for name in tasks.names:
        if name not in known:
            hint = did_you_mean(name, known) or "; `lm-eval ls tasks` lists them, and include_path=FOLDER adds yours"
            raise ConfigError(f"tasks={name} is not a task of lm-eval{hint}")
    try:
        # Before the model runs: a task without data would otherwise end the evaluation of the others.
        loaded = [item for name in tasks.names for item in _load(manager, name)]
    except Exception as error:  # lm-eval and its dataset loaders may raise any exception
        raise ConfigError(f"tasks={','.join(tasks.names)}: the data cannot be loaded: {one_line(error)}") from error
    results = simple_evaluate(
        lm,
        tasks=loaded,
        limit=tasks.limit,
        num_fewshot=tasks.num_fewshot,
        log_samples=False,
        task_manager=manager,
    )
    assert results is not None
    return dict(results)


def _load(manager: TaskManager, name: str) -> list[Any]:
    """Load a task, a group, or all tasks of a tag, as a list."""
    found: Any = manager.load(name)
    return [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())


def table(results: dict[str, Any]) -> str:
    """Return lm-eval's table of tasks, followed by its table of groups if there are any."""
    parts = [make_table(results)]
    if results.get("groups"):
        parts.append(make_table(results, "groups"))
    return "\n".join(part.strip("\n") for part in parts)


def figures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return `{task: {metric: value}}`; metrics of a filter other than `none` are named `metric,filter`."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in found.items()
            if "," in name and isinstance(value, int | float) and math.isfinite(value)
        }
        for task, found in results["results"].items()
    }


def write_results(results: dict[str, Any], path: Path, more: dict[str, Any]) -> None:
    """Write the results, and the additional entries `more`, as JSON to a new file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results | more, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_whole(path, text + "\n")


def results_file(step: Path, names: Sequence[str]) -> Path:
    """Return an unused path for the results of a checkpoint, in the folder `lm_eval` of its run."""
    run = step.parent.parent if step.parent.name == "checkpoints" else step.parent
    started = time.strftime("%Y%m%d-%H%M%S")
    stem = f"{step.name}-{'-'.join(names)[:60]}-{started}"
    taken = (run / "lm_eval" / f"{stem}{f'-{n}' if n else ''}.json" for n in range(10**6))
    return next(path for path in taken if not path.exists())
