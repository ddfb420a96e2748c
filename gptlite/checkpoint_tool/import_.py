"""Makes a checkpoint of a Hugging Face GPT-2 folder: import HF_FOLDER RUN_DIR

HF_FOLDER holds config.json and model.safetensors, whole or in shards. RUN_DIR becomes a run with one checkpoint of step
0. Train on from its weights: gptlite train checkpoint.resume=RUN_DIR checkpoint.load=weights model=... data=...
"""

from dataclasses import dataclass
from pathlib import Path

from gptlite.checkpoint_tool.places import existing
from gptlite.progress import log


@dataclass
class Options:
    """There are none."""


def run(paths: list[str], options: Options) -> int:
    """Imports."""
    from gptlite.huggingface import import_

    source, target = paths
    print(import_(existing(source), Path(target).expanduser(), log=log))
    return 0
