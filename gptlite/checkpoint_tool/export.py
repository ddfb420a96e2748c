"""Writes the weights for Hugging Face: export RUN_OR_STEP TARGET [dtype=fp32] [max_shard_bytes=5000000000]

TARGET becomes a folder that transformers' from_pretrained reads, GPT2LMHeadModel's for a GPT: safetensors, config.json
and, where it has that form, the tokenizer. RUN_OR_STEP is read whole and verified; of a run it is the newest intact
checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path

from gptlite.checkpoint_tool.places import existing
from gptlite.progress import log


@dataclass
class Options:
    """What may follow the paths."""

    dtype: str = "fp32"
    max_shard_bytes: int = 5_000_000_000


def run(paths: list[str], options: Options) -> int:
    """Exports."""
    from gptlite.checkpoint_tool.huggingface import export

    source, target = paths
    export(
        existing(source),
        Path(target).expanduser(),
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        log=log,
    )
    print(target)
    return 0
