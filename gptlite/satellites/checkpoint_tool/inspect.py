"""Print the contents of a checkpoint: inspect RUN_OR_STEP [tensors=true] [tensor=NAME] [json=true]

The output lists step, layout, versions, sizes, configuration and the largest tensors; for a run, those of its newest
checkpoint. tensors=true lists all tensors. tensor=NAME reads one tensor and prints its statistics and its boxes: offset
and sizes in the tensor, and the file. json=true prints JSON for scripts. Only the sizes of files are checked; `verify`
also checks the contents. The exit code is 1 if a file is missing or truncated.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gptlite.checkpoint.compare import flatten
from gptlite.checkpoint.find import damage
from gptlite.checkpoint.manifest import Manifest, read_manifest
from gptlite.errors import ConfigError, did_you_mean, printable
from gptlite.metrics.console import format_bytes, format_count, table
from gptlite.progress import log
from gptlite.satellites.checkpoint_tool.places import checkpoint_config, one_checkpoint, when

LARGEST = 5
NONE = "n/a"
KINDS = {"model": "model.", "optimizer": "optim."}
# Bits per element. For other dtypes, the digits in the name are the bits.
BITS = {"bool": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "complex64": 64, "complex128": 128}


@dataclass
class Options:
    """Options of the subcommand."""

    tensors: bool = False
    tensor: str | None = None
    json: bool = False


def run(paths: list[str], options: Options) -> int:
    """Print a summary or a tensor. Return 1 if the checkpoint is damaged."""
    folder = one_checkpoint(paths[0])
    manifest, reason = read_manifest(folder), damage(folder, log)
    if options.tensor is not None:
        _print_tensor(folder, manifest, options.tensor, options.json)
        return 1 if reason else 0
    facts = summary(folder, manifest, reason)
    if options.json:
        print(json.dumps(facts | ({"tensors": manifest.tensors} if options.tensors else {}), indent=1))
    else:
        _print_summary(facts)
        _print_tensors(manifest, None if options.tensors else LARGEST)
    return 1 if reason else 0


def tensor_bytes(entry: dict[str, Any]) -> int:
    """Return the size in bytes of a tensor, from its manifest entry."""
    name = entry["dtype"]
    bits = BITS.get(name) or int("".join(char for char in name if char.isdigit()))
    return prod(entry["shape"]) * bits // 8


def summary(folder: Path, manifest: Manifest, reason: str) -> dict[str, Any]:
    """Return the content of the summary, which json=true prints as it is. `reason` is the damage, if any."""
    return {
        "path": str(folder),
        "damage": reason or None,
        "format_version": manifest.format_version,
        "created": manifest.created,
        "meta": manifest.meta,
        "environment": manifest.environment,
        "bytes": sum(entry["bytes"] for entry in manifest.files.values()),
        "files": manifest.files,
        "kinds": {word: _kind(manifest, prefix) for word, prefix in KINDS.items()},
        "config": None if reason else checkpoint_config(folder),
    }


def _kind(manifest: Manifest, prefix: str) -> dict[str, int]:
    entries = [entry for key, entry in manifest.tensors.items() if key.startswith(prefix)]
    return {
        "tensors": len(entries),
        "elements": sum(prod(entry["shape"]) for entry in entries),
        "bytes": sum(map(tensor_bytes, entries)),
    }


def _print_summary(facts: dict[str, Any]) -> None:
    meta, where, files, (date, age) = facts["meta"], facts["environment"], facts["files"], when(facts["created"])
    tokens, samples = (_given(meta.get(key), ",") for key in ("tokens", "consumed_samples"))
    best, last = _given(meta.get("best_val_loss"), ".4f"), _given(meta.get("evaluated_step"))
    identity = flatten(meta.get("data_identity") or {})
    machine = [where.get("platform"), where.get("instruction_set"), f"threads {_given(where.get('threads'))}"]
    kinds = [
        f"{word} {format_bytes(each['bytes'])} in {each['tensors']} tensors"
        + (f" ({format_count(each['elements'])} parameters)" if word == "model" else "")
        for word, each in facts["kinds"].items()
    ]
    print(printable(facts["path"]))
    _print_facts(
        ("status", f"DAMAGED: {facts['damage']}" if facts["damage"] else "file sizes intact; verify checks every byte"),
        ("progress", f"step {meta['step']}, {tokens} tokens, {samples} samples"),
        ("validation", "" if best == NONE else f"best {best} nats per token; last at step {last}"),
        ("written", f"{date} UTC, {age} ago; format version {facts['format_version']}"),
        ("layout", _given(where.get("layout"))),
        ("versions", ", ".join(f"{name} {_given(where.get(name))}" for name in ("gptlite", "torch", "python"))),
        ("machine", ", ".join(filter(None, [*machine, where.get("gpu") or "no GPU"]))),
        ("data", ", ".join(f"{key} {_short(value)}" for key, value in identity.items())),
        *(_config_facts(facts["config"]) if facts["config"] else ()),
        ("tensors", "; ".join(kinds)),
        ("size", f"{format_bytes(facts['bytes'])} in {len(files)} files"),
    )
    rows = [(name, format_bytes(entry["bytes"]), entry["sha256"][:12]) for name, entry in files.items()]
    print("", *table(("file", "size", "sha256"), rows, right="size"), sep="\n")


def _print_facts(*pairs: tuple[str, str]) -> None:
    """Print a line for each name and text. Pairs with an empty text are omitted."""
    print(*(printable(f"  {word:<11} {text}") for word, text in pairs if text), sep="\n")


def _given(value: object, form: str = "", instead: str = NONE) -> str:
    return instead if value is None else format(value, form)


def _short(value: object) -> str:
    text = _given(value, instead="none")
    return text[:8] if len(text) == 64 else text  # a SHA-256


def _config_facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return three pairs of name and text: model, batch and training."""
    flat = flatten(config)

    def of(key: str, instead: str = NONE) -> str:
        return _given(flat.get(key), instead=instead)

    sequences = f"{of('data.global_batch_size')} sequences of {of('data.sequence_length')}"
    rule, schedule = (of(f"schemas.{group}").removesuffix("_schema") for group in ("optimizer", "schedule"))
    return [
        (
            "model",
            ", ".join(f"{key} {_given(value, instead='null')}" for key, value in (config["model"] or {}).items()),
        ),
        (
            "batch",
            f"{sequences}, micro-batch {of('data.micro_batch_size', 'as large as fits')}, {of('precision.dtype')}",
        ),
        ("training", f"{rule}, lr {of('optimizer.lr')}, {schedule}, seed {of('seed')}"),
    ]


def _print_tensors(manifest: Manifest, most: int | None) -> None:
    ranked = list(manifest.tensors.items())
    if most is not None:
        ranked = sorted(ranked, key=lambda item: -tensor_bytes(item[1]))[:most]
    rows = [(key, str(e["shape"]), e["dtype"], f"{tensor_bytes(e) / 2**20:.3f}") for key, e in ranked]
    title = "tensor" if most is None else "largest tensors"
    print("", *table((title, "shape", "dtype", "MiB"), rows, right="MiB"), sep="\n")


def _print_tensor(folder: Path, manifest: Manifest, name: str, as_json: bool) -> None:
    if name not in manifest.tensors:
        hint = did_you_mean(name, manifest.tensors) or "; tensors=true lists them"
        raise ConfigError(f"tensor={name} is not in {folder}{hint}")
    from gptlite.checkpoint.load import whole_tensors
    from gptlite.checkpoint.metadata import boxes_of, read_metadata
    from gptlite.satellites.checkpoint_tool.statistics import statistics

    entry, boxes = manifest.tensors[name], boxes_of(read_metadata(folder, manifest), name)
    numbers = statistics(whole_tensors(folder, log)(name))
    if as_json:
        held = [{"file": f"data/{at.relative_path}", "offset": b.offsets, "sizes": b.sizes} for b, at in boxes]
        print(json.dumps({"name": name, **entry, "bytes": tensor_bytes(entry), **numbers, "boxes": held}, indent=1))
        return
    print(printable(f"{name}  {entry['dtype']} {entry['shape']}, {format_bytes(tensor_bytes(entry))}"))
    _print_facts(*((key, _given(value, ".8g")) for key, value in numbers.items()))
    rows = [
        (f"data/{at.relative_path}", str(list(box.offsets)), str(list(box.sizes)), f"{at.offset:,}", f"{at.length:,}")
        for box, at in boxes
    ]
    header = ("file", "offset", "sizes", "at byte", "bytes there")
    print("", *table(header, rows), sep="\n")
