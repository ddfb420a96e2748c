"""DeepSpeed JSON files as configurations: `deepspeed=ds_config.json`, and `gptlite import-config`. See
docs/deepspeed.md."""

from __future__ import annotations

from gptlite.progress import Log

KEY = "deepspeed="


def with_deepspeed(overrides: list[str], log: Log | None = None) -> list[str]:
    """Return the overrides with those of the JSON in place of `deepspeed=FILE`. Raises ConfigError."""
    if not any(each.lstrip("+").startswith(KEY) for each in overrides):
        return overrides
    from gptlite.satellites.deepspeed.expand import expanded  # its tables take a while to import

    return expanded(overrides, log)
