"""Closing lines of a test run: the machine, the order of the tests and, after failures, what to do."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import pytest
from cpu_levels import cpu_level

from gptlite.cpu import LIMITS, cpu_cores, cpu_name

PACKAGES = ("torch", "numpy", "hydra-core", "transformers")


def machine() -> str:
    """The CPU with its instruction set and what limits it, and versions."""
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    level = f"{cpu_level()} by {' '.join(limits)}" if limits else cpu_level()
    found = [f"Python {platform.python_version()}", *filter(None, map(_version, PACKAGES))]
    return f"{cpu_name() or platform.machine()}, {level}, {cpu_cores()} cores; {', '.join(found)}"


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def seeds(config: pytest.Config) -> str:
    """The seeds that chose the tests and their order; empty without any."""
    words = {"--sample": "sample of the tests:", "--order": "test order:"}
    given = {name: config.getoption(name) for name in words}
    return "; ".join(f"{words[name]} {name}={seed}" for name, seed in given.items() if seed is not None)


def closing(config: pytest.Config, failed: list[str]) -> list[str]:
    """The closing lines. `failed`: ids of the tests that failed."""
    lines = [machine(), *filter(None, [seeds(config)])]
    if not failed:
        return lines
    limits = [f"{name}={os.environ[name]} " for name in LIMITS if name in os.environ]
    alone = f"{''.join(limits)}pytest -n 0 '{failed[0]}'"
    order = config.getoption("--order")
    again = f"{''.join(limits)}pytest --order={order}" if order is not None else "the same command"
    return [
        *lines,
        f"To see a failure alone: {alone}",
        "If it fails again, report it with the lines above. If it passes, the machine was too busy, or the test",
        f"depends on the tests before it: {again} runs them in this order again.",
    ]
