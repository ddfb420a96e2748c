"""User modules that register models, datasets and optimizers, imported before a configuration is composed.

A module is imported if the command line names it (`plugins=[my_models]`), or if an installed package declares it as an
entry point. Reading a configuration from a file imports nothing: if the configuration requests a plugin that has not
been imported, `refuse_unnamed` raises an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Container, Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from gptlite.config.overrides import hydra_value, unquoted
from gptlite.errors import ConfigError, text_of
from gptlite.parallelism.messages import passed_on

# Checks of a whole configuration, which raise ConfigError. Global on purpose: a plug-in adds its own.
CHECKS: list[Callable[[Any], None]] = []
GROUP = "gptlite.plugins"  # group of the entry points
# Plugins that come with gptlite.
INCLUDED = (
    "gptlite.satellites.activations",
    "gptlite.satellites.compressed",
    "gptlite.satellites.corpus",
    "gptlite.satellites.deterministic",
    "gptlite.satellites.elastic.check",
    "gptlite.satellites.images",
    "gptlite.satellites.noise",
    "gptlite.satellites.nvme",
    "gptlite.satellites.onebit",
    "gptlite.satellites.optimizers",
    "gptlite.satellites.samples",
    "gptlite.satellites.zeropp",
)
GIVEN = re.compile(r"\+{0,2}plugins=\[?([^\]]*)\]?$")
RESOLVER = re.compile(r"\$\{[^}]*:")  # ${oc.env:NAME}, ${now:...}; ${model.peak_lr} is of the configuration
KEY = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w./-]*")


@passed_on
class PluginsNotNamed(ConfigError):
    """Raised when a saved configuration needs plugins that the command line has not named."""


def named_in(overrides: Iterable[str]) -> list[str]:
    """Return the modules named by the last `plugins=` of a command line."""
    found = [match[1] for each in overrides if (match := GIVEN.match(each))]
    return [name for each in (found[-1] if found else "").split(",") if (name := unquoted(each.strip()))]


def import_plugins(names: Iterable[str]) -> None:
    """Import the plugins of installed packages, and the modules `names` from the Python path or the working directory.

    Raises ConfigError if an import fails.
    """
    import_installed()
    for name in names:
        here = os.getcwd()
        if here not in sys.path:  # for a console script, sys.path has the script's folder instead
            sys.path.append(here)
        try:
            if import_module(name).__file__ is None:
                raise ConfigError(
                    f"plugins=[{name}]: the folder {name} in {here} has no __init__.py; run the command in that "
                    "folder, or install it with pip"
                )
        except ConfigError:
            raise
        except ModuleNotFoundError as error:
            # Distinguish a missing plugin or parent package from an import that fails inside the plugin.
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigError(
                    f"plugins=[{name}]: no module named {error.name} in {here} or among the installed packages; "
                    "run the command in the module's folder, or install it with pip"
                ) from error
            raise ConfigError(f"plugins=[{name}]: {error}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(f"plugins=[{name}]: {_in_words(error)}") from error


def import_included() -> None:
    """Import the plugins that come with gptlite."""
    for name in INCLUDED:
        import_module(name)


@cache
def import_installed() -> None:
    """Import the plugins that come with gptlite, and the modules that installed packages declare as entry points of the
    group gptlite.plugins, once.

    Raises ConfigError, with the name of the package, if an entry point cannot be imported.
    """
    import_included()
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            package = point.dist.name if point.dist else "an installed package"
            raise ConfigError(
                f"{package}: its plugin {point.name} = {point.value}: {_in_words(error)}; repair or uninstall {package}"
            ) from error


def refuse_unnamed(names: list[str], where: object) -> None:
    """Raise PluginsNotNamed unless this process has imported all of these modules. The message begins with `where`, the
    source of the configuration that uses them."""
    if any(name not in sys.modules for name in names):
        given, pronoun = as_override(names), "them" if len(names) > 1 else "it"
        raise PluginsNotNamed(f"{where} uses {given}; add {given} to the command to import {pronoun}")


def as_override(names: Iterable[str]) -> str:
    """Return the override that requests plugins, such as `plugins=[a,b]`."""
    return f"plugins=[{','.join(map(hydra_value, names))}]"


def refuse_foreign(overrides: Iterable[object], where: object, overridden: Container[str] = ()) -> None:
    """Raise ConfigError if an override stored in `where` may run code, if it reads the environment and its key is not
    in `overridden`, or if the stored overrides request plugins that have not been imported."""
    texts = [str(each) for each in overrides]
    for text in texts:
        if may_run_code(text):
            raise ConfigError(f"{where}: the stored override {text!r:.80} may run code; remove it there")
        if (key := text.partition("=")[0].lstrip("+~")) not in overridden and RESOLVER.search(text):
            raise ConfigError(
                f"{where}: the stored override {text!r:.80} reads what is outside the configuration; give {key}=VALUE"
            )
    refuse_unnamed(named_in(texts), where)


def may_run_code(override: str) -> bool:
    """Return True unless an override sets a key of a run, or chooses a preset in conf/ by its name.

    Keys of the section `hydra` can contain classes for Hydra to import. Given a path in place of a preset's name, Hydra
    would read a file that could set such keys.
    """
    key, _, value = override.partition("=")
    section = re.split(r"[./]", key.lstrip("+~"))[0]
    preset = "." not in key
    foreign = section == "hydra" and override != "hydra.mode=RUN"
    return foreign or not KEY.fullmatch(key) or (preset and re.search(r"\.\.|\$", value) is not None)


def _in_words(error: BaseException) -> str:
    return f"importing it raised {type(error).__name__}: {' '.join(text_of(error).split())}"
