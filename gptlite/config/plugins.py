"""User modules that register models: `plugins=[my_models]`, imported before a configuration is composed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from importlib import import_module

from gptlite.errors import ConfigError

GIVEN = re.compile(r"\+{0,2}plugins=\[?([^\]]*)\]?$")


def named_in(overrides: Iterable[str]) -> list[str]:
    """Return the modules named by the last `plugins=` of a command line."""
    found = [match[1] for each in overrides if (match := GIVEN.match(each))]
    return [name for each in (found[-1] if found else "").split(",") if (name := each.strip(" '\""))]


def import_plugins(names: Iterable[str]) -> None:
    """Import modules from the Python path or the working directory. Raises ConfigError if an import fails."""
    for name in names:
        here = os.getcwd()
        if here not in sys.path:  # a console script's path has its own folder instead of the working directory
            sys.path.append(here)
        try:
            import_module(name)
        except ConfigError:
            raise
        except ModuleNotFoundError as error:
            # Tell a missing plugin, or a missing parent package, from an import that fails inside the plugin.
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigError(
                    f"plugins=[{name}]: no module named {error.name} in {here} or among the installed packages"
                ) from error
            raise ConfigError(f"plugins=[{name}]: {error}") from error
        except Exception as error:
            raise ConfigError(f"plugins=[{name}]: {type(error).__name__} while it was imported: {error}") from error
