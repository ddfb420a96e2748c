"""What is in a checkpoint: inspect RUN_OR_STEP [tensors=true] [tensor=NAME] [json=true]

Step, layout, versions, sizes, configuration and the largest tensors, of the newest checkpoint if a run is given.
tensors=true lists all of them. tensor=NAME reads one: its statistics, and which file holds which box. json=true prints
the same for scripts. Files are checked by size; `verify` reads them. Exit code 1 if a file is missing or cut short.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gptlite.checkpoint.manifest import Manifest, read_manifest
from gptlite.checkpoint_tool.places import checkpoint_config, damage, one_checkpoint
from gptlite.checkpoint_tool.tables import facts, shape, when
from gptlite.errors import ConfigError, did_you_mean
from gptlite.metrics.console import format_bytes, format_count, table

LARGEST = 5
KINDS = {"model": "model.", "optimizer": "optim."}
COUNTS = {"tokens": "tokens", "consumed_samples": "samples"}
# Of the dtypes whose name does not end with it.
BITS = {"bool": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "complex64": 64, "complex128": 128}


@dataclass
class Options:
    """What may follow the path."""

    tensors: bool = False
    tensor: str | None = None
    json: bool = False


def run(paths: list[str], options: Options) -> int:
    """Prints it. Returns 1 if the checkpoint is damaged."""
    folder = one_checkpoint(paths[0])
    manifest, reason = read_manifest(folder), damage(folder)
    if options.tensor is not None:
        _print_tensor(folder, manifest, options.tensor, options.json)
    elif options.json:
        print(json.dumps(as_json(folder, manifest, reason, options.tensors), indent=1))
    else:
        _print_summary(folder, manifest, reason)
        _print_tensors(manifest, None if options.tensors else LARGEST)
    return 1 if reason else 0


def tensor_bytes(entry: dict[str, Any]) -> int:
    """Bytes of a tensor, from its entry in the manifest."""
    name = entry["dtype"]
    bits = BITS.get(name) or int("".join(char for char in name if char.isdigit()))
    return prod(entry["shape"]) * bits // 8


def as_json(folder: Path, manifest: Manifest, reason: str, tensors: bool) -> dict[str, Any]:
    """All of the summary, as JSON."""
    summary = {
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
    return summary | ({"tensors": manifest.tensors} if tensors else {})


def _kind(manifest: Manifest, prefix: str) -> dict[str, int]:
    entries = [entry for key, entry in manifest.tensors.items() if key.startswith(prefix)]
    return {
        "tensors": len(entries),
        "elements": sum(prod(entry["shape"]) for entry in entries),
        "bytes": sum(map(tensor_bytes, entries)),
    }


def _print_summary(folder: Path, manifest: Manifest, reason: str) -> None:
    meta, environment = manifest.meta, manifest.environment
    size = sum(entry["bytes"] for entry in manifest.files.values())
    date, age = when(manifest.created)
    best, identity = meta.get("best_val_loss"), meta.get("data_identity") or {}
    kinds = {word: _kind(manifest, prefix) for word, prefix in KINDS.items()}
    spelled = [
        f"{word} {format_bytes(each['bytes'])} in {each['tensors']} tensors"
        + (f" ({format_count(each['elements'])} parameters)" if word == "model" else "")
        for word, each in kinds.items()
    ]
    print(folder)
    progress = [f"step {meta.get('step')}", *(f"{_count(meta, key)} {word}" for key, word in COUNTS.items())]
    validated = "" if best is None else f"best {best:.4f} nats per token; last at step {meta.get('evaluated_step')}"
    pairs = [
        ("status", f"DAMAGED: {reason}" if reason else "intact by sizes; verify reads every byte"),
        ("progress", ", ".join(progress)),
        ("validation", validated),
        ("written", f"{date} UTC, {age} ago; format version {manifest.format_version}"),
        ("layout", str(environment.get("layout", "n/a"))),
        ("versions", ", ".join(f"{name} {environment.get(name)}" for name in ("gptlite", "torch", "python"))),
        ("machine", _machine(environment)),
        ("data", ", ".join(f"{key} {_short(value)}" for key, value in identity.items())),
        *([] if reason else _config_facts(checkpoint_config(folder))),
        ("tensors", "; ".join(spelled)),
        ("size", f"{format_bytes(size)} in {len(manifest.files)} files"),
    ]
    print(*facts(pairs), sep="\n")
    rows = [(name, format_bytes(entry["bytes"]), entry["sha256"][:12]) for name, entry in manifest.files.items()]
    print("", *table(("file", "size", "sha256"), rows, right="size"), sep="\n")


def _count(meta: dict[str, Any], key: str) -> str:
    return "n/a" if meta.get(key) is None else f"{meta[key]:,}"


def _short(value: object) -> str:
    text = str(value)
    return text[:8] if len(text) == 64 else text  # a SHA-256


def _machine(environment: dict[str, Any]) -> str:
    words = [environment.get("platform"), environment.get("instruction_set"), f"threads {environment.get('threads')}"]
    return ", ".join(str(word) for word in [*words, environment.get("gpu") or "no GPU"] if word)


def _config_facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    """The configuration in three lines."""
    model, data, schemas = (config.get(name) or {} for name in ("model", "data", "schemas"))
    optimizer = config.get("optimizer") or {}
    name = {group: str(schemas.get(group, "n/a")).removesuffix("_schema") for group in ("optimizer", "schedule")}
    return [
        (
            "model",
            f"{model.get('name')}: {model.get('num_layers')} layers, {model.get('num_heads')} heads, d "
            f"{model.get('d_model')}, vocabulary {model.get('vocab_size')}, {model.get('sequence_length')} positions",
        ),
        (
            "batch",
            f"{data.get('global_batch_size')} sequences of {data.get('sequence_length')}, micro-batch "
            f"{data.get('micro_batch_size')}, {(config.get('precision') or {}).get('dtype')}",
        ),
        ("training", f"{name['optimizer']}, lr {optimizer.get('lr')}, {name['schedule']}, seed {config.get('seed')}"),
    ]


def _print_tensors(manifest: Manifest, most: int | None) -> None:
    ranked = list(manifest.tensors.items())
    if most is not None:
        ranked = sorted(ranked, key=lambda item: -tensor_bytes(item[1]))[:most]
    rows = [(key, shape(e["shape"]), e["dtype"], f"{tensor_bytes(e) / 2**20:.3f}") for key, e in ranked]
    title = "tensor" if most is None else "largest tensors"
    print("", *table((title, "shape", "dtype", "MiB"), rows, right="MiB"), sep="\n")


def _print_tensor(folder: Path, manifest: Manifest, name: str, as_json: bool) -> None:
    if name not in manifest.tensors:
        hint = did_you_mean(name, manifest.tensors) or "; tensors=true lists them"
        raise ConfigError(f"tensor={name} is not in {folder}{hint}")
    from gptlite.checkpoint_tool.boxes import read_boxes, read_whole
    from gptlite.checkpoint_tool.statistics import statistics

    entry, boxes = manifest.tensors[name], read_boxes(folder, manifest)[name]
    numbers = statistics(read_whole(folder, {name: entry})[name])
    if as_json:
        held = [{"file": f"data/{b.file}", "offset": b.offset, "sizes": b.sizes} for b in boxes]
        print(json.dumps({"name": name, **entry, "bytes": tensor_bytes(entry), **numbers, "boxes": held}, indent=1))
        return
    print(f"{name}  {entry['dtype']} {shape(entry['shape'])}, {format_bytes(tensor_bytes(entry))}")
    print(*facts([(key, "n/a" if value is None else f"{value:.8g}") for key, value in numbers.items()]), sep="\n")
    rows = [(f"data/{b.file}", shape(b.offset), shape(b.sizes), f"{b.position:,}", f"{b.length:,}") for b in boxes]
    header = ("file", "offset", "sizes", "at byte", "bytes there")
    print("", *table(header, rows), sep="\n")
