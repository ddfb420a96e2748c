"""Tiny Shakespeare."""
