"""Weights & Biases sink. The package is imported only when a run selects it."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptlite.errors import ConfigError
from gptlite.metrics.config import WandbConfig


class WandbSink:
    """Sink for one W&B run, stored in `<run_dir>/wandb`; `id` identifies it across resumes.

    The run is online if an API key is set. Without a key (and a terminal to ask for it), or if the server cannot be
    reached, it is offline after one warning; with `mode: online` that is an error. A resumed run passes its `id`. If
    the resumed run is online, the W&B run continues; if it is offline, `wandb sync` joins the parts in order of time.

    Raises:
        ConfigError: W&B cannot start the run in the requested mode.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        run_name: str,
        resolved_config: dict[str, Any],
        id: str | None = None,
        log: Callable[[str], None] = print,
    ):
        import wandb

        def start(mode: Any) -> Any:
            return wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                job_type="train",
                name=run_name,
                id=id,
                resume="allow" if id else None,
                config=resolved_config,
                dir=str(run_dir),
                mode=mode,
                reinit="create_new",  # a process may train several runs, one after the other
                settings=wandb.Settings(quiet=True, silent=mode == "offline"),
            )

        run_dir.mkdir(parents=True, exist_ok=True)
        self._teardown = wandb.teardown
        with _cache_inside(run_dir):
            try:
                self._run = start(config.mode)
            except wandb.Error as error:
                reason = str(error).strip().splitlines()[0]
                if config.mode is not None:
                    raise ConfigError(
                        f"logger.mode={config.mode}: W&B reports: {reason}; try logger.mode=offline"
                    ) from error
                log(f"warning: W&B is offline ({reason})")
                try:
                    self._run = start("offline")
                except wandb.Error as second:
                    raise ConfigError(f"logger=wandb: W&B reports: {second}; try logger=jsonl") from second
        if self._run.offline:
            folder = Path(self._run.dir).parent
            log(f"W&B run {self._run.id} is offline; upload it with: wandb sync {folder}")
        # Rows repeat steps after a resume from an earlier checkpoint, and W&B drops a row whose own step goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def id(self) -> str:
        """W&B run ID, stored in checkpoints and passed to `build_sinks(wandb_id=...)` on resume."""
        return self._run.id

    def write(self, row: Mapping[str, Any]) -> None:
        """Log one row without its None values, which W&B would show as numbers, and without lists."""
        shown = {key: value for key, value in row.items() if value is not None and not isinstance(value, list)}
        self._run.log(shown)

    def rewind(self, step: int) -> None:
        """Do nothing: W&B keeps its rows, and later rows repeat their steps, as after a resume."""

    def close(self, failed: bool = False) -> None:
        """Wait until W&B has received everything, and mark the run as finished or failed."""
        self._run.finish(exit_code=1 if failed else 0)
        # W&B's helper process keeps using this run's folder, so the next job of a sweep must start a new one.
        self._teardown()


@contextmanager
def _cache_inside(run_dir: Path) -> Iterator[None]:
    """Put W&B's cache folder, to which its helper process logs, into the run folder. W&B has only an environment
    variable for it, and the default is in the home folder."""
    name = "WANDB_CACHE_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(run_dir / "wandb" / "cache")
    try:
        yield
    finally:
        del os.environ[name]
