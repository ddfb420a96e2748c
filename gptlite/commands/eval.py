"""Evaluate a trained model: on held-out text in bits per byte, or on tasks of lm-eval.

gptlite eval [checkpoint=outputs/RUN] [data=FILE_FOLDER_OR_PRESET] [samples=N]
gptlite eval [checkpoint=outputs/RUN] tasks=hellaswag,arc_easy [limit=N] [num_fewshot=N] [include_path=FOLDER] \\
    [output=FILE]

checkpoint is a run folder (its newest checkpoint is used) or a step folder in one; by default, the run below outputs/
that wrote a checkpoint last (checkpoint=latest). Both forms take [micro_batch_size=16] [precision=auto]
[tokenizer=TOKENIZER] [plugins=[MODULE,...]] and the parallelism keys of train, e.g. parallelism=tp2_pp2
parallelism.zero=3.

Text: without data, the run's own validation set is used. data is a text file or a folder of *.txt files, which are
tokenized with the run's tokenizer and evaluated completely; or a prepared folder or a data preset of train (data=mine
is ./data/mine) with the run's tokenizer, whose validation set is used. samples selects that many evenly spaced
sequences.

Tasks: names of tasks and groups of lm-eval, which `pip install 'gptlite[eval]'` installs. limit is the number of items
used of each task, and num_fewshot the number of examples in a prompt. include_path is a folder with YAML files of
further tasks. The results are also written as JSON to RUN/lm_eval/, or to output.

micro_batch_size is the number of sequences that each data-parallel rank evaluates at a time. tokenizer is for an
imported checkpoint without one; it takes the same values as in preprocess. The last line is JSON, for scripts.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from gptlite.commands.eval_arguments import Arguments
from gptlite.commands.train import run_command
from gptlite.config.command_line import parse_arguments
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.progress import counted

OF_TASKS, OF_TEXT = ("limit", "num_fewshot", "include_path", "output"), ("data", "samples")
LAYOUT = re.compile(r"\+?parallelism[.=]")


def main() -> NoReturn:
    """Run the command line and exit."""
    run_command(run, __doc__)


def run(command_line: list[str]) -> int:
    """Evaluate in this process, or on the ranks of a layout; return the exit code. Raises ConfigError."""
    started = time.monotonic()
    layout = [each for each in command_line if LAYOUT.match(each)]
    arguments = parse_arguments(Arguments, [each for each in command_line if each not in layout])
    check(arguments)
    from gptlite.commands.newest_run import newest_run  # imports torch, so only after the values are checked

    arguments.checkpoint = newest_run(arguments.checkpoint, "checkpoint")
    from gptlite.launch.starter import starter

    outer = starter()
    if not layout and outer is None:
        from gptlite.commands.eval_rank import evaluate

        evaluate(arguments)
        return 0
    config, world = laid_out(arguments, layout, outer.world_size if outer else None)
    if outer:
        from gptlite.commands.eval_rank import on_rank
        from gptlite.launch.worker import under

        return under(outer, config, started, lambda *given: on_rank(arguments, *given))
    from gptlite.launch.elastic import run_ranks

    return run_ranks(config, world, started, ("-m", "gptlite.commands.eval_rank", json.dumps(asdict(arguments))))


def check(arguments: Arguments) -> None:
    """Raise ConfigError for arguments that are invalid for any checkpoint."""
    for key in ("micro_batch_size", "samples"):
        if (value := getattr(arguments, key)) is not None and value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
    of_text, of_tasks = ([key for key in keys if getattr(arguments, key) is not None] for keys in (OF_TEXT, OF_TASKS))
    if arguments.tasks is None:
        if of_tasks:
            raise ConfigError(f"{of_tasks[0]}={getattr(arguments, of_tasks[0])} requires tasks; give tasks=NAME,NAME")
        return
    if of_text:
        raise ConfigError(
            f"{of_text[0]}={getattr(arguments, of_text[0])} is for texts only; leave out {of_text[0]} or tasks"
        )
    if not arguments.task_names:
        raise ConfigError(f"tasks={arguments.tasks}: give names of tasks, e.g. tasks=hellaswag,arc_easy")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"limit={arguments.limit}: must be at least 1")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise ConfigError(f"num_fewshot={arguments.num_fewshot} must not be negative")
    if (folder := arguments.include_path) is not None and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"include_path={folder} is not a folder; give one with YAML files of tasks")
    if arguments.output is not None and Path(arguments.output).expanduser().exists():
        raise ConfigError(f"output={arguments.output} exists; give a new file")
    if find_spec("lm_eval") is None:
        raise ConfigError(f"tasks={arguments.tasks} needs lm-eval; pip install 'gptlite[eval]'")


def laid_out(arguments: Arguments, layout: list[str], world: int | None) -> tuple[Config, int]:
    """Return the checkpoint's configuration with another layout, and the number of ranks: `world` or, if it is None, as
    many as the layout needs. Raises ConfigError for a layout that does not fit."""
    import torch

    from gptlite.checkpoint.find import candidates, first_intact
    from gptlite.checkpoint.load import read_config
    from gptlite.config.checks import check_forward
    from gptlite.config.compose import load_layout
    from gptlite.config.plugins import import_plugins
    from gptlite.config.saved import from_yaml
    from gptlite.parallelism.layout import wanted_world

    import_plugins(arguments.plugins)
    path = first_intact(
        candidates(arguments.checkpoint, "checkpoint"), arguments.checkpoint, "checkpoint", print, read_config
    )
    saved = from_yaml(read_config(path), arguments.checkpoint)
    # Restarted ranks would print their results again.
    config = replace(saved, parallelism=load_layout(layout), trainer=replace(saved.trainer, max_restarts=0))
    gpus = torch.cuda.device_count()
    ranks = world or wanted_world(config.parallelism, gpus)
    check_forward(config, ranks)
    if world is None and gpus and ranks > gpus:
        raise ConfigError(
            f"the layout has {ranks} ranks, but this machine has {counted(gpus, 'GPU')}; "
            "set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return config, ranks
