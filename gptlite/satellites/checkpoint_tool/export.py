"""Write the weights as a Hugging Face folder: export RUN_OR_STEP TARGET [dtype=fp32] [max_shard_bytes=5000000000]
    [check=true|false]

TARGET becomes a folder that transformers loads with from_pretrained (for a GPT, GPT2LMHeadModel): safetensors,
config.json and, if it can be converted, the tokenizer. Every byte of the checkpoint is verified; for a run, the newest
intact checkpoint is exported. check=true loads the folder with transformers before it appears, and compares log
probabilities and token ids; by default, this is done for up to 2 GB where transformers is installed.
plugins=[MODULE,...] imports the modules that register the model.
"""

from dataclasses import dataclass, field
from pathlib import Path

from gptlite.config.plugins import import_plugins
from gptlite.errors import printable
from gptlite.progress import log
from gptlite.satellites.checkpoint_tool.places import existing


@dataclass
class Options:
    """Options of the subcommand."""

    dtype: str = "fp32"
    max_shard_bytes: int = 5_000_000_000
    check: bool | None = None
    plugins: list[str] = field(default_factory=list)


def run(paths: list[str], options: Options) -> int:
    """Export a checkpoint and print the target."""
    from gptlite.satellites.checkpoint_tool.huggingface import export

    import_plugins(options.plugins)
    source, target = paths
    export(
        existing(source),
        Path(target).expanduser(),
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        check=options.check,
        log=log,
    )
    print(printable(target))
    return 0
