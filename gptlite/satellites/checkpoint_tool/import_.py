"""Create a checkpoint from Hugging Face or Meta weights: import FOLDER RUN_DIR [plugins=[MODULE,...]]

FOLDER is a Hugging Face folder with config.json and the weights (model.safetensors, in one file or in shards, or
pytorch_model.bin), or the folder of a Llama from Meta with params.json and all consolidated.NN.pth.
RUN_DIR becomes a run with one checkpoint, of step 0. The modules in plugins register custom models. To train from the
weights: gptlite train checkpoint.resume=RUN_DIR checkpoint.load=weights model=... data=...
"""

from dataclasses import dataclass, field
from pathlib import Path

from gptlite.errors import printable
from gptlite.progress import log
from gptlite.satellites.checkpoint_tool.places import existing


@dataclass
class Options:
    """Options of the subcommand."""

    plugins: list[str] = field(default_factory=list)


def run(paths: list[str], options: Options) -> int:
    """Import a model and print the checkpoint's folder."""
    from gptlite.satellites.checkpoint_tool.huggingface import import_

    source, target = paths
    print(printable(import_(existing(source), Path(target).expanduser(), plugins=options.plugins, log=log)))
    return 0
