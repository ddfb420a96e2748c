"""Starting ranks."""

from distributed.conftest import start

__all__ = ["start"]
