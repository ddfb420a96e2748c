"""Starting sweeps."""

from distributed.conftest import start

__all__ = ["start"]
