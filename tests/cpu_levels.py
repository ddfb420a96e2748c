"""The instruction sets of this machine, for tests."""

from gptlite.cpu import LEVELS, cpu_flags


def cpu_level() -> str:
    """The highest level that the CPU has and the environment allows."""
    flags = cpu_flags()
    return next(level for level in reversed(LEVELS) if not LEVELS[level] or LEVELS[level] in flags)
