"""What differs between two checkpoints or configurations: diff A B [values=true]

A and B are each a run (its newest checkpoint), a checkpoint, or a config.yaml. Configurations differ in classes, by
what resuming A under B's would do:

  refused              another model or other data
  changes the numbers  the curve leaves that of an uninterrupted run
  reshards             the same run up to rounding: its work is cut otherwise over ranks and micro-batches
  safe                 the same run to the last bit

Of two checkpoints also: where they were made, how far they are, and keys, shapes and dtypes of tensors. values=true
reads all tensors, both sides, and says how far they are apart. Exit codes: 0 the same, 1 different.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlite.checkpoint.compare import compare_configs
from gptlite.checkpoint.manifest import Entries, Manifest, read_manifest
from gptlite.checkpoint_tool.inspect import tensor_bytes
from gptlite.checkpoint_tool.places import checkpoint_config, config_of, existing, is_step, one_checkpoint
from gptlite.checkpoint_tool.tables import shape
from gptlite.errors import ConfigError
from gptlite.metrics.console import table

CLASSES = {
    "refused": "refused",
    "changes_numbers": "changes the numbers",
    "reshards": "reshards",
    "safe": "safe",
}
BATCH_BYTES = 1 << 28  # of tensors read at a time, on each side
MOST = 20  # rows of a table


@dataclass
class Options:
    """What may follow the paths."""

    values: bool = False


@dataclass(frozen=True)
class Side:
    """A configuration, and the checkpoint it lies in if there is one."""

    path: Path
    config: dict[str, Any]
    manifest: Manifest | None


def run(paths: list[str], options: Options) -> int:
    """Prints the differences. Returns 1 if there are any."""
    a, b = map(read_side, paths)
    lines = list(differences(a, b, options.values))
    print(f"a  {a.path}", f"b  {b.path}", *(lines or ["no difference"]), sep="\n")
    return int(bool(lines))


def read_side(path: str) -> Side:
    """What a path stands for. Raises ConfigError, DamagedCheckpoint."""
    found = existing(path)
    if found.is_file():
        try:
            return Side(found, config_of(found.read_text(encoding="utf-8"), path), None)
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not text; give a config.yaml, a run or a checkpoint") from None
    saved = found / "config.yaml"
    if not is_step(found) and saved.is_file() and not any((found / "checkpoints").glob("step-*")):
        return read_side(str(saved))
    folder = one_checkpoint(path)
    return Side(folder, checkpoint_config(folder), read_manifest(folder))


def differences(a: Side, b: Side, values: bool) -> Iterator[str]:
    """The lines to print; none if there is no difference."""
    if values and (a.manifest is None or b.manifest is None):
        missing = a.path if a.manifest is None else b.path
        raise ConfigError(f"values=true: {missing} is a configuration and holds no tensors; give two checkpoints")
    yield from _config_lines(a.config, b.config)
    if a.manifest is None or b.manifest is None:
        return
    yield from _plain_lines("environment", a.manifest.environment, b.manifest.environment)
    yield from _plain_lines("state", a.manifest.meta, b.manifest.meta)
    yield from _tensor_lines(a.manifest.tensors, b.manifest.tensors)
    if values:
        yield from _value_lines(a, b)
    elif _data_hashes(a.manifest) != _data_hashes(b.manifest):
        yield "values: the files of tensors differ; values=true says which tensors, and how far"


def _config_lines(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    found = compare_configs(a, b)
    # What was typed does not count: all that came of it is compared itself.
    rows = [
        (words, each.key, _cut(each.old), _cut(each.new))
        for name, words in CLASSES.items()
        for each in getattr(found, name)
        if each.key != "run.overrides"
    ]
    if rows:
        yield "configuration"
        yield from table(("class", "key", "a", "b"), rows)


def _plain_lines(title: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    keys = [*a, *(key for key in b if key not in a)]
    rows = [(key, _cut(a.get(key)), _cut(b.get(key))) for key in keys if a.get(key) != b.get(key)]
    if rows:
        yield title
        yield from table(("key", "a", "b"), rows)


def _cut(value: object, most: int = 40) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _tensor_lines(a: Entries, b: Entries) -> Iterator[str]:
    keys = [*a, *(key for key in b if key not in a)]
    rows = [(key, _spell(a.get(key)), _spell(b.get(key))) for key in keys if a.get(key) != b.get(key)]
    if rows:
        yield f"tensors: {len(rows)} of {len(keys)} differ in shape or dtype, or are on one side alone"
        yield from table(("key", "a", "b"), rows[:MOST])
        yield from _more(rows)


def _spell(entry: dict[str, Any] | None) -> str:
    return f"{entry['dtype']} {shape(entry['shape'])}" if entry else "absent"


def _more(rows: list[Any]) -> Iterator[str]:
    if len(rows) > MOST:
        yield f"  and {len(rows) - MOST} more"


def _data_hashes(manifest: Manifest) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in manifest.files.items() if name.endswith(".distcp")}


def _value_lines(a: Side, b: Side) -> Iterator[str]:
    """Of tensors of one shape, those whose values differ, the farthest apart first."""
    from gptlite.checkpoint_tool.boxes import read_whole
    from gptlite.checkpoint_tool.statistics import distance

    assert a.manifest is not None
    assert b.manifest is not None
    ours, theirs = a.manifest.tensors, b.manifest.tensors
    common = [key for key in ours if key in theirs and ours[key]["shape"] == theirs[key]["shape"]]
    found = {}
    for keys in _batches(common, ours):
        x, y = (read_whole(side.path, {key: e[key] for key in keys}) for side, e in ((a, ours), (b, theirs)))
        found |= {key: distance(x[key], y[key]) for key in keys}
    apart = sorted((key for key in found if found[key].differing), key=lambda key: -found[key].relative)
    if not apart:
        return
    yield f"values: {len(apart)} of {len(common)} tensors differ"
    rows = [
        (key, f"{found[key].differing:,}", f"{found[key].largest:.3g}", f"{found[key].relative:.3g}")
        for key in apart[:MOST]
    ]
    yield from table(("tensor", "elements", "max|a-b|", "|a-b|/|a|"), rows, right="elements max|a-b| |a-b|/|a|")
    yield from _more(apart)


def _batches(keys: list[str], entries: Entries) -> Iterator[list[str]]:
    """The keys in their order, in groups of tensors that fit in memory together."""
    batch, size = [], 0
    for key in keys:
        if batch and size + tensor_bytes(entries[key]) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += tensor_bytes(entries[key])
    if batch:
        yield batch
