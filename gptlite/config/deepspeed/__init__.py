"""DeepSpeed JSON files as configurations: `deepspeed=ds_config.json`, and `gptlite import-config`. See
docs/deepspeed.md."""

from gptlite.config.deepspeed.expand import overrides_of, with_deepspeed
from gptlite.config.deepspeed.file import read
from gptlite.config.deepspeed.translate import translate

__all__ = ["overrides_of", "read", "translate", "with_deepspeed"]
