"""Verify checkpoints by reading every byte: verify RUN_OR_STEP ... [hashes=false]

A checkpoint passes if its files match the manifest in size and SHA-256 (read from disk, not from the page cache, where
the system allows it), every element of every tensor is in exactly one box of a file, and no weight is NaN or infinite.
For a run, or a folder of runs, all checkpoints are verified, newest first. With hashes=false, only sizes and the
completeness of tensors are checked. The exit code is 1 if a checkpoint fails.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from gptlite.checkpoint.manifest import DamagedCheckpoint
from gptlite.checkpoint.manifest import verify as verify_files
from gptlite.errors import printable
from gptlite.metrics.console import format_bytes
from gptlite.progress import log
from gptlite.satellites.checkpoint_tool.places import checkpoints


@dataclass
class Options:
    """Options of the subcommand."""

    hashes: bool = True


def run(paths: list[str], options: Options) -> int:
    """Print a line for each checkpoint. Return 1 if one is damaged."""
    folders = list(dict.fromkeys(folder for path in paths for folder in checkpoints(path)))
    results = [_verify(folder, options.hashes) for folder in folders]
    if len(results) > 1:
        print(f"{results.count(True)} of {len(results)} intact")
    return 0 if all(results) else 1


def _verify(folder: Path, hashes: bool) -> bool:
    from gptlite.checkpoint.load import whole_tensors
    from gptlite.checkpoint.metadata import read_metadata
    from gptlite.satellites.checkpoint_tool.statistics import not_finite

    began = time.monotonic()
    try:
        manifest = verify_files(folder, log, hashes=hashes)
        seconds = time.monotonic() - began
        read_metadata(folder, manifest)  # refuses incomplete tensors
        read = whole_tensors(folder, log)
        weights = [key for key in manifest.tensors if key.startswith("model.")] if hashes else []
        for key in weights:
            if problem := not_finite(read(key)):
                print(printable(f"BAD      {folder}  its files are intact, but {key} {problem}"), flush=True)
                return False
    except DamagedCheckpoint as error:
        print(printable(f"DAMAGED  {folder}  {error.reason}"), flush=True)
        return False
    size = sum(entry["bytes"] for entry in manifest.files.values())
    pace = f" read in {seconds:.1f} s, {format_bytes(size / max(seconds, 1e-3))}/s" if hashes else ", sizes only"
    words = f"ok       {folder}  {format_bytes(size)}{pace}; all {len(manifest.tensors)} tensors complete"
    print(printable(words), flush=True)
    return True
