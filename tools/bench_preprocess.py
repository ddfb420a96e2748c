"""Benchmark of `gptlite preprocess` and Megatron-LM's preprocessing: tokens per second and memory.

python tools/bench_preprocess.py text=FILE.txt tokenizer=FILE.model [megabytes=64] [workers=1,2] [repeats=3]
    [megatron='COMMAND']

text       text file from which a corpus of JSON lines is made. Paragraphs are recombined at random, and one word in 50
           is replaced by random letters, so that the tokenizer also encounters new words
megatron   command of Megatron-LM's tools/preprocess_data.py, such as 'python Megatron-LM/tools/preprocess_data.py'. It
           gets the same corpus, tokenizer and number of workers, and must produce the same tokens

Each run is a separate command, timed from start to end. In each repeat, every case runs once. The last lines are
medians, with rates including and excluding `start`: the time of the same command for a single document, measured once
per repeat. `CPU` is the CPU time of all processes. `largest` is the peak memory of a single process, and `together` the
peak of the sum over processes, sampled 5 times per second (shared pages count for each process). Exit codes: 0 done,
1 tokens differ, 2 refused.
"""

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.progress import Progress

NEW_WORDS = 50  # one in this many words is random
PARAGRAPHS = 40  # maximum number per document
PART = 1 << 20  # bytes per read
POLL, LOOK = 0.01, 0.2  # seconds between polls of the process, and between samples of its memory
Case = tuple[str, int]  # name of the tool, and number of workers


@dataclass
class Arguments:
    """Command-line arguments."""

    text: str = "???"
    tokenizer: str = "???"
    megabytes: float = 64.0
    workers: str = "1,2"
    repeats: int = 3
    megatron: str | None = None


class Run(NamedTuple):
    """Cost of one command: seconds, CPU seconds, peak MiB of the largest process, and peak MiB of all processes."""

    seconds: float
    cpu: float
    largest: float
    together: float


Tokens = tuple[int, str]  # number of tokens, and the hash of their int32 values


def main(arguments: Arguments) -> int:
    """Print a line for each run and the medians, and return the exit code. Raises ConfigError for invalid arguments."""
    if arguments.repeats < 1 or arguments.megabytes <= 0:
        raise ConfigError(
            f"repeats={arguments.repeats} must be at least 1, and megabytes={arguments.megabytes:g} above 0"
        )
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", arguments.workers):
        raise ConfigError(f"workers={arguments.workers} must be comma-separated numbers above 0, such as 1,2")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name, "corpus.jsonl")
        make_corpus(Path(arguments.text), corpus, round(arguments.megabytes * 1e6))
        return 0 if bench(corpus, arguments, Path(name)) else 1


def make_corpus(text: Path, corpus: Path, size: int) -> None:
    """Write about `size` bytes of JSON lines. The corpus is deterministic for a given text."""
    try:
        paragraphs = [each + "\n\n" for each in re.split(r"\n\s*\n", text.read_text(encoding="utf-8")) if each.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"text={text} cannot be read: {error}") from None
    rng, done = random.Random(0), 0
    progress = Progress("making the corpus", size, lambda line: print(line, flush=True))
    with open(corpus, "wb") as file:
        while done < size:
            words = "".join(rng.choices(paragraphs, k=rng.randrange(1, PARAGRAPHS))).split(" ")
            for _ in range(len(words) // NEW_WORDS):
                words[rng.randrange(len(words))] = "".join(rng.choices(string.ascii_lowercase, k=9))
            line = json.dumps({"text": " ".join(words)}, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            done += len(line)
            progress.add(len(line))


def bench(corpus: Path, arguments: Arguments, folder: Path) -> bool:
    """Run all cases on a corpus, print the results, and return True if all runs produced the same tokens."""
    one = folder / "one.jsonl"  # the first document, to measure the start of the command
    with open(corpus, "rb") as file:
        one.write_bytes(file.readline())
    names = ["gptlite", *(["Megatron-LM"] if arguments.megatron else [])]
    counts = [int(each) for each in arguments.workers.split(",")]
    starts: dict[str, list[float]] = {name: [] for name in names}
    runs: dict[Case, list[Run]] = {(name, workers): [] for workers in counts for name in names}
    print(f"{corpus.stat().st_size / 1e6:,.1f} MB of JSON lines", flush=True)
    tokens: set[Tokens] = set()
    for _ in range(arguments.repeats):
        for name in names:
            starts[name].append(run((name, counts[0]), one, arguments, folder)[0].seconds)
        for case, made in runs.items():
            last, produced = run(case, corpus, arguments, folder)
            made.append(last)
            print(line(case, last, produced[0]), flush=True)
            if tokens and produced not in tokens:
                print(f"{case[0]} with {case[1]} workers: DIFFERENT TOKENS", flush=True)
            tokens.add(produced)
    same, (count, _) = len(tokens) == 1, min(tokens)
    print(f"medians of {arguments.repeats} repeats; {count:,} tokens{', the same in all runs' if same else ''}")
    middle = {case: Run(*map(median, zip(*made, strict=True))) for case, made in runs.items()}
    show(middle, {name: median(each) for name, each in starts.items()}, count, counts)
    return same


def run(case: Case, corpus: Path, arguments: Arguments, folder: Path) -> tuple[Run, Tokens]:
    """Run one command and return its cost and tokens. The command's output folder is deleted."""
    name, workers = case
    output = folder / "output"
    if name == "gptlite":
        command = [sys.executable, "-m", "gptlite", "preprocess", f"input={corpus}", f"tokenizer={arguments.tokenizer}"]
        command += [f"output={output}", f"workers={workers}", "validation_fraction=0"]
        prefix = output / "train"
    else:
        output.mkdir()
        command = [*shlex.split(str(arguments.megatron)), "--input", str(corpus), "--append-eod"]
        command += ["--output-prefix", str(output / "megatron"), "--workers", str(workers)]
        command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", arguments.tokenizer]
        prefix = output / "megatron_text_document"
    try:
        made = timed(command, folder / "log")
        return made, read_tokens(prefix)
    finally:
        shutil.rmtree(output, ignore_errors=True)


def read_tokens(prefix: Path) -> Tokens:
    """Return the number and hash of a dataset's tokens.

    Reads the file in small parts, since the peak memory reported for a command includes that of this process.
    """
    from gptlite.data.indexed import IndexedDataset

    dtype = IndexedDataset(prefix).tokens.dtype
    count, digest = 0, hashlib.blake2b()
    with open(f"{prefix}.bin", "rb") as file:
        while part := file.read(PART):
            ids = np.frombuffer(part, dtype=dtype)
            count += ids.size
            digest.update(ids.astype(np.int32).tobytes())
    return count, digest.hexdigest()


def timed(command: list[str], log: Path) -> Run:
    """Run a command and measure it. Raises ConfigError if it fails."""
    together, started = 0.0, time.monotonic()
    looked = started
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - looked > LOOK:
            together, looked = max(together, memory(process.pid)), time.monotonic()
        time.sleep(POLL)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ConfigError(f"{shlex.join(command)} failed: {(said or ['?'])[-1]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, together)


def memory(pid: int) -> float:
    """Return the current memory of a process and its descendants in MiB (Linux). Ended processes count as 0."""
    total = 0.0
    try:
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory(int(child)) for child in (task / "children").read_text().split())
    except (OSError, IndexError):
        pass
    return total


def line(case: Case, made: Run, tokens: int) -> str:
    """Return the line printed for a run."""
    return (
        f"{case[0]:11} {case[1]} workers: {made.seconds:6.1f} s, {tokens / made.seconds / 1e6:.2f}M tokens/s; "
        f"CPU {made.cpu:.1f} s, {tokens / made.cpu / 1e6:.2f}M tokens/s of CPU time; "
        f"largest {made.largest:.0f} MiB, together {made.together:.0f} MiB"
    )


def show(runs: dict[Case, Run], starts: dict[str, float], tokens: int, counts: list[int]) -> None:
    """Print the medians, the scaling from the first to the last number of workers, and our relative speed."""
    without = {case: made.seconds - starts[case[0]] for case, made in runs.items()}
    for case, made in runs.items():
        steady = f"{tokens / without[case] / 1e6:.2f}M" if without[case] > 0 else "unknown"
        print(f"{line(case, made, tokens)}; {steady} without a start of {starts[case[0]]:.1f} s")
    few, many = counts[0], counts[-1]
    for name in starts:
        first, last = (name, few), (name, many)
        scaling = percent(runs[first].seconds * few, runs[last].seconds * many)
        steady = percent(without[first] * few, without[last] * many)
        print(f"{name}: {scaling} scaling efficiency from {few} to {many} workers, {steady} without the start")
    for workers in counts if len(starts) > 1 else ():
        ours, theirs = ("gptlite", workers), ("Megatron-LM", workers)
        speed, steady = percent(runs[theirs].seconds, runs[ours].seconds), percent(without[theirs], without[ours])
        print(f"{workers} workers: gptlite has {speed} of Megatron-LM's speed, {steady} without the starts")


def percent(part: float, whole: float) -> str:
    """Return `part / whole` in percent, or "unknown" if either is not positive, as after subtracting a long start."""
    return f"{part / whole:.0%}" if part > 0 and whole > 0 else "unknown"


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
