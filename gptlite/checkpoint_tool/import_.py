"""Create a checkpoint from a Hugging Face folder, e.g. of a GPT-2: import HF_FOLDER RUN_DIR [plugins=[MODULE,...]]

HF_FOLDER contains config.json and the weights: model.safetensors, in one file or in shards, or pytorch_model.bin.
RUN_DIR becomes a run with one checkpoint of step 0. The modules in plugins register custom models. To train from the
weights: gptlite train checkpoint.resume=RUN_DIR checkpoint.load=weights model=... data=...
"""

from dataclasses import dataclass, field
from pathlib import Path

from gptlite.checkpoint_tool.places import existing
from gptlite.progress import log


@dataclass
class Options:
    """Options of the subcommand."""

    plugins: list[str] = field(default_factory=list)


def run(paths: list[str], options: Options) -> int:
    """Import a model and print the checkpoint's folder."""
    from gptlite.checkpoint_tool.huggingface import import_

    source, target = paths
    print(import_(existing(source), Path(target).expanduser(), plugins=options.plugins, log=log))
    return 0
