"""Satellites: what uses the core, which never imports one of them (docs/decisions/0036)."""
