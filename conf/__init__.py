"""The presets, installed as `gptlite.conf`: one folder a section of the configuration."""
