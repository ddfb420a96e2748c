"""Tokens a second of tools/preprocess.py, by 1 and 2 workers, and of Megatron-LM's own preprocessing beside it.

python tools/bench_preprocess.py input=CORPUS.jsonl tokenizer=FILE.model [workers=1,2] [megatron='COMMAND'] [keep=DIR]

Each run is a command of its own, timed from its start to its end; the largest memory of all its processes is printed
beside. COMMAND is how to start Megatron's tools/preprocess_data.py, e.g. 'python Megatron-LM/tools/preprocess_data.py';
it gets the same lines, model and workers, and its tokens are compared with ours.
"""

import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptlite.errors import ConfigError
from gptlite.tool import run_tool

OURS = Path(__file__).with_name("preprocess.py")


@dataclass
class Arguments:
    """The command line."""

    input: str = "???"
    tokenizer: str = "???"
    workers: str = "1,2"
    megatron: str | None = None
    keep: str | None = None  # where outputs stay; null: they are removed


def main(arguments: Arguments) -> None:
    """Prints a line for each run."""
    from gptlite.data.indexed import IndexedDataset

    counts = [int(each) for each in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory(dir=arguments.keep) as folder:
        for workers in counts:
            output = Path(folder, f"ours{workers}")
            command = [sys.executable, str(OURS), f"input={arguments.input}", f"tokenizer={arguments.tokenizer}"]
            seconds = timed([*command, f"output={output}", f"workers={workers}", "validation_fraction=0"])
            tokens = IndexedDataset(output / "train").tokens
            show("gptlite", workers, len(tokens), seconds)
            if arguments.megatron:
                prefix = Path(folder, f"megatron{workers}")
                options = ["--input", arguments.input, "--output-prefix", str(prefix), "--workers", str(workers)]
                options += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", arguments.tokenizer]
                seconds = timed([*shlex.split(arguments.megatron), *options, "--append-eod"])
                theirs = IndexedDataset(prefix.with_name(prefix.name + "_text_document")).tokens
                show("Megatron-LM", workers, len(theirs), seconds)
                print("the same tokens" if np.array_equal(tokens, theirs) else "OTHER TOKENS", flush=True)


def timed(command: list[str]) -> float:
    """Seconds that a command took. Raises ConfigError where it fails."""
    started = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(f"{shlex.join(command)} failed: {(result.stderr.strip().splitlines() or ['?'])[-1]}")
    return time.monotonic() - started


def show(name: str, workers: int, tokens: int, seconds: float) -> None:
    """One line."""
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    rate = f"{tokens / seconds / 1e6:.2f}M tokens/s"
    print(f"{name:12} {workers} workers: {tokens:,} tokens in {seconds:.1f} s, {rate}, {memory:.0f} MiB", flush=True)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
