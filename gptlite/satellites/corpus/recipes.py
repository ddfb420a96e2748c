"""Recipes: programs data/<corpus>/prepare.py that write a prepared folder. Does not import torch or numpy."""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import gptlite
from gptlite.errors import ConfigError, did_you_mean
from gptlite.progress import Log
from gptlite.satellites.corpus.config import CorpusConfig


def find_recipe(corpus: str) -> Path:
    """Return a corpus's prepare.py in the installed package or the checkout. Raises ConfigError if there is none."""
    roots = [Path(gptlite.__file__).parents[1] / "data"]
    if (spec := importlib.util.find_spec("gptlite.recipes")) and spec.submodule_search_locations:
        roots = [Path(location) for location in spec.submodule_search_locations] + roots
    # Reversed, so that of two recipes with the same name, the one in the first root is kept.
    recipes = {script.parent.name: script for root in reversed(roots) for script in root.glob("*/prepare.py")}
    if corpus not in recipes:
        known = ", ".join(sorted(recipes)) or "none"
        hint = did_you_mean(corpus, recipes)
        raise ConfigError(f"data.corpus={corpus} has no recipe data/{corpus}/prepare.py; the recipes are {known}{hint}")
    return recipes[corpus]


def recipe_digest(script: Path) -> str:
    """Return the SHA-256 of a recipe, as part of the key of its cached folder."""
    # gptlite.satellites.corpus was a part of gptlite.data: folders that were cached then are still valid.
    return hashlib.sha256(
        script.read_bytes().replace(b"from gptlite.satellites.corpus.", b"from gptlite.data.")
    ).hexdigest()


def source_path(config: CorpusConfig) -> Path | None:
    """Return the local copy of a corpus's source, or None."""
    return Path(config.path).expanduser().resolve() if config.path else None


def run_recipe(config: CorpusConfig, folder: Path, log: Log) -> None:
    """Run the recipe of a corpus, which fills `folder`. Raises ConfigError with the reason if it fails."""
    # A recipe is a separate program. It runs with this Python and this gptlite, installed or not.
    script, source = find_recipe(config.corpus), source_path(config)
    arguments = {"output": folder, "tokenizer": config.tokenizer, "vocab_size": config.vocab_size, "path": source}
    options = [f"{name}={value}" for name, value in (arguments | config.arguments).items() if value is not None]
    paths = [str(Path(gptlite.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    last = ""
    with subprocess.Popen(
        [sys.executable, "-u", str(script), *options],  # -u: unbuffered, so lines arrive when printed
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    ) as process:
        try:
            for line in process.stdout or ():
                if last:
                    log(last)
                last = line.rstrip()  # held back: after a failure, the last line is the error
            code = process.wait()
        finally:
            process.kill()  # otherwise the recipe would continue after Ctrl-C
    if code:  # the last line of output gives the reason
        failed = f"data.corpus={config.corpus}: {script} failed: {last}"
        raise ConfigError(last.removeprefix("error: ") if code == 2 else failed)
    if last:
        log(last)
