"""`load` of the Python API: a configuration from overrides, among them DeepSpeed JSON files."""

from collections.abc import Iterable

from gptlite.config import compose
from gptlite.config.schema import Config
from gptlite.satellites.deepspeed import with_deepspeed


def load(overrides: Iterable[str] = ()) -> Config:
    """Return the configuration that `gptlite train` would run with these overrides: `KEY=VALUE`, `GROUP=PRESET` and
    `deepspeed=FILE`.

    If `run.dir=FOLDER` is an existing run, the overrides are added to those of the run, as on the command line. Raises
    ConfigError.
    """
    return compose.load(with_deepspeed(compose.as_overrides(overrides)))
