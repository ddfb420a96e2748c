"""Ranks that a file's tests share."""

from distributed.conftest import four, two

__all__ = ("four", "two")
