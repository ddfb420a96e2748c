"""Compare two checkpoints or configurations: diff A B [values=true]

A and B are each a run (its newest checkpoint), a checkpoint, or a config.yaml. Each difference between the
configurations has a class, which is its effect on a run that resumes from A with the configuration of B:

  refused              the seed, model, data or optimizer differs, so the run does not resume
  changes the numbers  the loss curve differs from that of an uninterrupted run
  reshards             results agree up to rounding: work is split differently over ranks or micro-batches
  safe                 results are bit-identical

For two checkpoints, the environment, the progress, and the keys, shapes and dtypes of tensors are compared too.
values=true also reads all tensors and prints their distances. Exit codes: 0 no difference, 1 different, 2 refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlite import limits
from gptlite.checkpoint.compare import Effect, compare_configs, flatten
from gptlite.checkpoint.find import is_step
from gptlite.checkpoint.manifest import Entries, Manifest, in_words, read_manifest
from gptlite.documents import DocumentError, read_text
from gptlite.errors import ConfigError, printable
from gptlite.metrics.console import table
from gptlite.progress import log
from gptlite.satellites.checkpoint_tool.places import checkpoint_config, config_of, existing, one_checkpoint

MOST = 20  # rows of a table


@dataclass
class Options:
    """Options of the subcommand."""

    values: bool = False


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a configuration, and the manifest of the checkpoint that contains it, if any."""

    path: Path
    config: dict[str, Any]
    manifest: Manifest | None


def run(paths: list[str], options: Options) -> int:
    """Print the differences. Return 1 if there are any."""
    a, b = map(read_side, paths)
    lines = list(differences(a, b, options.values))
    print(printable(f"a  {a.path}"), printable(f"b  {b.path}"), *(lines or ["no difference"]), sep="\n")
    return int(bool(lines))


def read_side(path: str) -> Side:
    """Return the configuration or checkpoint at a path. Raises ConfigError, or DamagedCheckpoint for a checkpoint."""
    location = existing(path)
    if location.is_file():
        try:
            return Side(location, config_of(read_text(location, limits.YAML_BYTES), path), None)
        except DocumentError as error:
            raise ConfigError(f"{path}: {error}; give a config.yaml, a run or a checkpoint") from None
    saved = location / "config.yaml"
    if not is_step(location) and saved.is_file() and not any((location / "checkpoints").glob("step-*")):
        return read_side(str(saved))
    folder = one_checkpoint(path)
    return Side(folder, checkpoint_config(folder), read_manifest(folder))


def differences(a: Side, b: Side, values: bool) -> Iterator[str]:
    """Yield the lines to print; none if there is no difference."""
    if values and (a.manifest is None or b.manifest is None):
        missing = a.path if a.manifest is None else b.path
        raise ConfigError(f"values=true: {missing} is a configuration and holds no tensors; give two checkpoints")
    # The list of overrides is ignored, since the values that the overrides set are compared.
    found = [each for each in compare_configs(a.config, b.config) if each.key != "run.overrides"]
    found.sort(key=lambda each: list(Effect).index(each.effect))
    rows = [(each.effect.value, each.key, _cut(each.old), _cut(each.new)) for each in found]
    yield from _titled("configuration", ("class", "key", "a", "b"), rows)
    if a.manifest is None or b.manifest is None:
        return
    yield from _titled("environment", ("key", "a", "b"), _rows(a.manifest.environment, b.manifest.environment, _cut))
    yield from _titled("state", ("key", "a", "b"), _rows(flatten(a.manifest.meta), flatten(b.manifest.meta), _cut))
    rows = _rows(a.manifest.tensors, b.manifest.tensors, in_words)
    keys = a.manifest.tensors.keys() | b.manifest.tensors.keys()
    title = f"tensors: {len(rows)} of {len(keys)} differ in shape or dtype, or are on one side only"
    yield from _titled(title, ("key", "a", "b"), rows, MOST)
    if values:
        yield from _value_lines(a.path, a.manifest.tensors, b.path, b.manifest.tensors)
    elif _data_hashes(a.manifest) != _data_hashes(b.manifest):
        yield "values: the tensor files differ; values=true lists the tensors and their distances"


def _rows(a: dict[str, Any], b: dict[str, Any], spell: Callable[[Any], str]) -> list[tuple[str, ...]]:
    """Return the differing items of two dicts, in the order of the first dict."""
    keys = [*a, *(key for key in b if key not in a)]
    return [(key, spell(a.get(key)), spell(b.get(key))) for key in keys if a.get(key) != b.get(key)]


def _titled(
    title: str, header: tuple[str, ...], rows: list[tuple[str, ...]], most: int | None = None, right: str = ""
) -> Iterator[str]:
    """Yield a table below its title, with at most `most` rows; nothing if there are no rows."""
    if rows:
        yield title
        yield from table(header, rows[:most], right=right)
    if most is not None and len(rows) > most:
        yield f"  and {len(rows) - most} more"


def _cut(value: object, most: int = 40) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _data_hashes(manifest: Manifest) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in manifest.files.items() if name.endswith(".distcp")}


def _value_lines(a: Path, ours: Entries, b: Path, theirs: Entries) -> Iterator[str]:
    """Yield a table of the tensors with equal shape and different values, largest distance first."""
    from gptlite.checkpoint.load import whole_tensors
    from gptlite.satellites.checkpoint_tool.statistics import distance

    common = [key for key in ours if key in theirs and ours[key]["shape"] == theirs[key]["shape"]]
    x, y = whole_tensors(a, log), whole_tensors(b, log)
    found = {key: distance(x(key), y(key)) for key in common}
    apart = sorted((key for key in found if found[key].differing), key=lambda key: -found[key].relative)
    rows = [
        (key, f"{found[key].differing:,}", f"{found[key].largest:.3g}", f"{found[key].relative:.3g}") for key in apart
    ]
    header = ("tensor", "elements", "max|a-b|", "|a-b|/|a|")
    title = f"values: {len(apart)} of {len(common)} tensors differ"
    yield from _titled(title, header, rows, MOST, right="elements max|a-b| |a-b|/|a|")
