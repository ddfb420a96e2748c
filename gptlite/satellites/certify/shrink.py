"""Reduction of a model's configuration: fewer blocks and heads, narrower layers, the same kinds of blocks.

Keys are reduced by their names (NAMES), which include those of Hugging Face configurations. A spec of a model with
other keys can define `reduced(config, need)`, which returns the configuration to check instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec

if TYPE_CHECKING:
    from torch import nn

HEAD_WIDTH = 8
SMALL = 20_000_000  # parameters of a model that is checked at its own size if no key reduces it
# Roles of keys, by name. Keys of a section `moe` follow its name.
NAMES = {
    "num_heads": "heads", "num_attention_heads": "heads", "n_head": "heads", "n_heads": "heads", "heads": "heads",
    "kv_heads": "kv_heads", "num_key_value_heads": "kv_heads", "n_kv_heads": "kv_heads", "num_kv_heads": "kv_heads",
    "head_dim": "head_dim", "d_head": "head_dim",
    "d_model": "width", "hidden_size": "width", "n_embd": "width", "dim": "width", "width": "width", "hidden": "width",
    "d_ff": "hidden", "intermediate_size": "hidden", "n_inner": "hidden", "ffn_dim": "hidden", "moe d_ff": "hidden",
    "num_layers": "blocks", "num_hidden_layers": "blocks", "n_layer": "blocks", "n_layers": "blocks",
    "depth": "blocks", "blocks": "blocks", "layers": "blocks",
    "sequence_length": "length", "max_position_embeddings": "length", "n_positions": "length", "n_ctx": "length",
    "vocab_size": "vocabulary", "vocab_multiple": "padding", "windows": "windows",
    "moe experts": "experts", "moe top_k": "top_k", "moe shared": "shared",
}  # fmt: skip


@dataclass(frozen=True)
class Need:
    """Sizes that a reduced layout needs: reduced degrees, `true` degrees of the axes tensor and expert, the number of
    stages, the least number of blocks, the sequence length (reduced and true) and the vocabulary size."""

    tensor: int
    tensor_true: int
    expert: int
    expert_true: int
    blocks: int
    length: int
    length_true: int
    vocabulary: int
    padding: int  # rows to which the vocabulary is padded


@dataclass(frozen=True)
class Shrunk:
    """Reduced model: its configuration, the keys that changed as `{key: (before, after)}`, and the numbers of blocks,
    None if the model has none."""

    config: Any
    changed: Mapping[str, tuple[Any, Any]]
    blocks: tuple[int, int] | None


def shrunk(spec: BaseSpec, config: Any, need: Need, legal: Callable[[Any], bool]) -> Shrunk:
    """Return the smallest configuration with the structure of `config` that `legal` accepts.

    Raises ConfigError if the model is large and no such configuration is known.
    """
    own = getattr(spec, "reduced", None)
    if own is not None:
        small = own(config, need)
        if not legal(small):
            raise ConfigError(f"the {spec.name} model: the configuration that `reduced` returns cannot run; correct it")
        return Shrunk(small, _changes(config, small), _counts(spec, config, small))
    keys = dict(_keys(config))
    roles = {key: NAMES[_short(key)] for key, value in keys.items() if _short(key) in NAMES and value is not None}
    wanted = _sizes(keys, roles, need)
    narrow = next(
        (made for unit in (1, 2, 4, 8, 16) if _fits(spec, config, made := _with(config, wanted(unit)), legal)), None
    )
    small = config if narrow is None else _shallow(spec, narrow, roles, need, legal)
    _refuse_large(spec, small)
    return Shrunk(small, _changes(config, small), _counts(spec, config, small))


def _sizes(keys: dict[str, Any], roles: dict[str, str], need: Need) -> Callable[[int], dict[str, Any]]:
    """Return a function that gives all keys but the number of blocks their smallest values, with widths in `unit`s."""
    of = {role: key for key, role in roles.items() if not _short(key).startswith("moe ")}  # one key each
    heads, groups = keys.get(of.get("heads", "")), keys.get(of.get("kv_heads", ""))
    each = min(2, max(1, heads // need.tensor_true)) if heads else 1  # heads of a rank
    few = {"heads": need.tensor * each}
    if heads and groups and groups < heads:  # groups stay shared by heads and, if they were, by ranks
        shared = groups < need.tensor_true
        few["kv_heads"] = 1 if shared else need.tensor * min(2, groups // need.tensor_true)
        few["heads"] = need.tensor * 2 if shared else few["kv_heads"] * 2
    elif groups:
        few["kv_heads"] = few["heads"]
    head_dim, width = keys.get(of.get("head_dim", "")), keys.get(of.get("width", ""))
    apart = bool(heads and head_dim and width != heads * head_dim)

    def sizes(unit: int) -> dict[str, Any]:
        narrow = few["heads"] * HEAD_WIDTH * unit if heads else HEAD_WIDTH * need.tensor * unit
        values = {
            **few,
            "head_dim": HEAD_WIDTH * unit,
            "width": narrow + HEAD_WIDTH * need.tensor if apart else narrow,
            "hidden": 2 * HEAD_WIDTH * need.tensor * unit,
            "length": need.length if keys.get(of.get("length", "")) == need.length_true else 2 * need.length,
            "vocabulary": need.vocabulary,
            "padding": need.padding,
            "experts": need.expert * 2 if keys.get("moe.experts", 0) > need.expert_true else max(2, need.expert),
            "top_k": min(2, keys.get("moe.top_k", 1)),
            "shared": min(1, keys.get("moe.shared", 0)),
        }
        windows = {key: _windows(keys[key], need) for key, role in roles.items() if role == "windows"}
        smaller = {
            key: values[role]
            for key, role in roles.items()
            if role in values and keys[key] and (role in few or role in ("length", "width") or values[role] < keys[key])
        }
        return smaller | windows

    return sizes


def _windows(windows: list[int], need: Need) -> list[int]:
    """Return attention windows in the same order of size, for shorter sequences."""
    inside = sorted({each for each in windows if 0 < each < need.length_true})
    small = {each: max(1, need.length * (place + 1) // (len(inside) + 1)) for place, each in enumerate(inside)}
    return [small.get(each, need.length if each else 0) for each in windows]


def _shallow(spec: BaseSpec, config: Any, roles: dict[str, str], need: Need, legal: Callable[[Any], bool]) -> Any:
    """Return the configuration with the fewest blocks that keep every kind of block and the stages."""
    key = next((key for key, role in roles.items() if role == "blocks"), None)
    if key is None:
        return config
    most, every = dict(_keys(config))[key], kinds(spec, config)
    for count in range(1, most):
        small = _with(config, {key: count})
        blocks = len(blocks_of(spec, small)) if legal(small) else 0
        if blocks >= need.blocks and kinds(spec, small) == every:
            return small
    return config


def kinds(spec: BaseSpec, config: Any) -> set[str]:
    """Return descriptions of the kinds of blocks: types, shapes of parameters, and settings of their modules, such as
    a window. A setting that has another value in every block, as its number does, is left out."""
    lists = {key: value for key, value in _keys(config) if NAMES.get(_short(key)) == "windows" and value}
    blocks = [
        [*_described(block), *((key, str(value[number % len(value)])) for key, value in lists.items())]
        for number, block in enumerate(blocks_of(spec, config))
    ]
    settings: dict[str, list[str]] = {}
    for name, value in (each for block in blocks for each in block if each[0].startswith("@")):
        settings.setdefault(name, []).append(value)
    numbers = {name for name, held in settings.items() if len(held) > 2 and len(set(held)) == len(held)}
    numbers |= {name for name in settings if name.rpartition(".")[2] in ("layer", "layer_idx", "index")}
    return {str([(name, value) for name, value in block if name not in numbers]) for block in blocks}


def blocks_of(spec: BaseSpec, config: Any) -> list[nn.Module]:
    """Return the blocks of a model, built without memory."""
    return list(spec.blocks(built(spec, config)).values())


def built(spec: BaseSpec, config: Any) -> nn.Module:
    """Return a model, built on the meta device. Raises ConfigError if it cannot be built."""
    from gptlite.models.model import Model
    from gptlite.ops.select import Ops

    return Model(spec, spec.with_vocabulary(config, 64)).build(Ops(), 0)


def _described(block: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in block.named_modules():
        yield f"{path}:type", type(module).__qualname__
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}:{name}", str(tuple(parameter.shape))
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, int | float | str | bool | None):
                yield f"@{path}.{name}", repr(value)


def _fits(spec: BaseSpec, config: Any, small: Any, legal: Callable[[Any], bool]) -> bool:
    """Return True if a narrower model is legal and its blocks have the modules of the whole model's."""
    if not legal(small):
        return False
    try:
        ours, theirs = ([_types(each) for each in blocks_of(spec, made)] for made in (small, config))
    except (ConfigError, ValueError):
        return False
    return ours == theirs


def _types(block: nn.Module) -> list[tuple[str, str]]:
    return [(path, type(module).__qualname__) for path, module in block.named_modules()]


def _refuse_large(spec: BaseSpec, config: Any) -> None:
    count = sum(each.numel() for each in built(spec, config).parameters())
    if count > SMALL:
        raise ConfigError(
            f"the {spec.name} model has {count:,} parameters, and no other key is known to reduce it to what this "
            "machine can check; give a smaller model.*, or define `reduced` in its spec (docs/certify.md)"
        )


def _counts(spec: BaseSpec, config: Any, small: Any) -> tuple[int, int] | None:
    counts = [len(blocks_of(spec, made)) for made in (config, small)]
    return (counts[0], counts[1]) if counts[0] else None


def _short(key: str) -> str:
    """Return a key without its section, e.g. `hidden_size` for `settings.hidden_size`, or `moe top_k`."""
    section, _, name = key.rpartition(".")
    return f"moe {name}" if section == "moe" else name


def _keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a dataclass or a dict, and of those in it."""
    items = {item.name: getattr(section, item.name) for item in fields(section)} if is_dataclass(section) else section
    for name, value in items.items():
        if is_dataclass(value) or isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _with(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass or a dict with other values of these dotted keys."""
    own: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        inner = own.get(name, section[name] if isinstance(section, dict) else getattr(section, name))
        own[name] = _with(inner, {rest: value}) if rest else value
    return section | own if isinstance(section, dict) else replace(section, **own)


def _changes(config: Any, small: Any) -> dict[str, tuple[Any, Any]]:
    before, after = dict(_keys(config)), dict(_keys(small))
    return {key: (before.get(key), value) for key, value in after.items() if value != before.get(key)}


def row_counts(spec: BaseSpec, config: Any) -> list[int]:
    """Return the first size of each parameter with dims, along which ZeRO shards it."""
    return [each.shape[0] for each in built(spec, config).parameters() if each.dim()]
