"""Comparison of a run's configuration with that of a checkpoint, which decides whether the run may resume from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Effect(Enum):
    """Effect of a difference on a resumed run.

    refused: the seed, model, data or optimizer differs, so the run does not resume. changes_numbers: the loss curve
    differs from that of an uninterrupted run. reshards: results agree up to rounding, since ranks and micro-batches
    share the work differently. safe: results are bit-identical.
    """

    refused = "refused"
    changes_numbers = "changes the numbers"
    reshards = "reshards"
    safe = "safe"


# The longest prefix of a key in this table gives the key's effect. Keys without a prefix in it, such as those of
# optimizer, schedule, precision and ops, change the numbers.
EFFECTS: dict[str, Effect] = {
    "seed": Effect.refused,
    "model": Effect.refused,
    # Not of the model, but of its training.
    "model.dropout": Effect.changes_numbers,
    "model.z_loss": Effect.changes_numbers,
    "model.moe.sequence_loss": Effect.changes_numbers,
    "model.moe.z_loss": Effect.changes_numbers,
    "model.name": Effect.safe,
    "model.peak_lr": Effect.safe,  # only the default of optimizer.lr, which is compared separately
    "model.init_std": Effect.safe,  # the weights come from the checkpoint
    "data.corpus": Effect.refused,
    "data.path": Effect.refused,
    "data.tokenizer": Effect.refused,
    "data.vocab_size": Effect.refused,
    "data.sequence_length": Effect.changes_numbers,  # begins a new era of the data order: docs/data_order.md
    "data.blend": Effect.changes_numbers,
    "data.validation_fraction": Effect.refused,
    "data.num_tokens": Effect.refused,
    "data.micro_batch_size": Effect.reshards,  # the loss is a sum over the global batch, however it is split
    "data.cache_dir": Effect.safe,
    "data_identity": Effect.refused,
    "data_identity.sequence_length": Effect.changes_numbers,
    "parallelism": Effect.reshards,
    "parallelism.compression": Effect.changes_numbers,
    "parallelism.compression_rank": Effect.changes_numbers,
    "parallelism.deterministic": Effect.changes_numbers,
    "parallelism.zeropp": Effect.changes_numbers,
    "parallelism.zeropp.secondary": Effect.safe,  # the backward pass has the weights of the forward pass
    "parallelism.prefetch": Effect.safe,  # changes when data is transferred, not the order of summation
    "parallelism.timeout_seconds": Effect.safe,
    "parallelism.offload_path": Effect.safe,  # scratch space
    "parallelism.offload_buffer_mib": Effect.safe,
    "parallelism.activation_checkpointing": Effect.safe,  # the same operations, some of them recomputed
    "trainer": Effect.safe,
    "trainer.compile": Effect.changes_numbers,
    "trainer.spike": Effect.changes_numbers,
    "checkpoint": Effect.safe,
    "logger": Effect.safe,
    "cluster": Effect.safe,  # hardware assumptions of the planner
    "run": Effect.safe,
    # Name of each section's schema, from gptlite.config.saved.to_dict.
    "schemas": Effect.safe,
    "schemas.model": Effect.refused,
    "schemas.data": Effect.refused,
    "schemas.optimizer": Effect.refused,
    "schemas.schedule": Effect.changes_numbers,
}

# With checkpoint.load=weights, data and optimizer may differ. The tokenizer may not, as the weights depend on its ids.
_TOKENIZER_KEYS = ("data.tokenizer", "data.vocab_size", "data_identity.tokenizer")
_REFUSED_FOR_WEIGHTS = ("model", *_TOKENIZER_KEYS)
_SAME_STATE = ("adamw_schema", "adamw_8bit_schema")  # their optimizer states are the same in a checkpoint
_ABSENT = "absent"
_HASH = 64  # characters of a SHA-256 in hexadecimal
_FOLDERS = "data_identity.folders."  # prefix of the keys with each prepared folder's token hashes
_NO_TOKENIZER = (None, "none")  # values of the tokenizer keys in an imported checkpoint


@dataclass(frozen=True)
class Difference:
    """Key whose values differ, both values, and the effect. A value is `"absent"` if a configuration lacks the key."""

    key: str
    old: Any
    new: Any
    effect: Effect

    def __str__(self) -> str:
        """Return e.g. `optimizer=sgd (was muon)`, also for a difference of the dataclasses in `schemas`; hashes of the
        data are shortened."""
        if self.key.startswith("data_identity."):
            new, old = (f"{each:.12}..." if len(f"{each}") == _HASH else each for each in (self.new, self.old))
            return f"the data's {self.key.removeprefix('data_identity.')}={new} (was {old})"
        if self.key.startswith("schemas."):
            new, old = (str(each).removesuffix("_schema") for each in (self.new, self.old))
            return f"{self.key.removeprefix('schemas.')}={new} (was {old})"
        return f"{self.key}={self.new} (was {self.old})"


class Differences(list[Difference]):
    """Differences between two configurations, in the key order of the newer one."""

    def of(self, effect: Effect) -> list[Difference]:
        """Return the differences that have this effect."""
        return [each for each in self if each.effect is effect]

    def refusal(self, load: str = "all") -> str:
        """Return a message for ConfigError on the refused differences, given checkpoint.load; empty if there are
        none."""
        rule = "a resumed run keeps its seed, model, data and optimizer"
        fix = "restore the old value, or start anew with checkpoint.resume=never in another run.dir"
        if load == "weights":
            rule = "loaded weights keep their model and tokenizer"
            fix = "give data with the checkpoint's tokenizer, or leave out checkpoint.resume and checkpoint.load"
            if any(each.key.startswith(("model", "schemas.model")) for each in self.of(Effect.refused)):
                fix = "leave out model: checkpoint.load=weights uses the checkpoint's model"
        return _line("", self.of(Effect.refused), f"{rule}; {fix}")

    def notice(self) -> str:
        """Return a log line that lists the differences that change the loss curve; empty if there are none."""
        words = "the loss curve will differ from that of an uninterrupted run"
        return _line("resuming with ", self.of(Effect.changes_numbers), words)

    def resharding(self) -> str:
        """Return a log line that lists the differences that reshard the run; empty if there are none."""
        return _line("resuming with ", self.of(Effect.reshards), "the results stay the same up to rounding")

    def harmless(self) -> str:
        """Return a log line that lists the safe differences other than `run.*`; empty if there are none."""
        safe = [each for each in self.of(Effect.safe) if not each.key.startswith("run.")]
        return _line("resuming with ", safe, "the results stay the same")


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any], load: str = "all") -> Differences:
    """Return the differences between a checkpoint's configuration and this run's, with their effects on training.

    Both are nested dicts of resolved values. `load` is checkpoint.load: with `weights`, optimizer, schedule, seed and
    data may differ.
    """
    before, after = flatten(old), flatten(new)
    return Differences(
        Difference(key, before.get(key, _ABSENT), after.get(key, _ABSENT), _effect(key, before, after, load))
        for key in [*after, *(key for key in before if key not in after)]
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    )


def effect_of(key: str) -> Effect:
    """Return the effect of a changed key, independent of its values."""
    return EFFECTS.get(next((p for p in _prefixes(key) if p in EFFECTS), ""), Effect.changes_numbers)


def _effect(key: str, before: dict[str, Any], after: dict[str, Any], load: str) -> Effect:
    effect, one_sided = effect_of(key), key not in before or key not in after
    if key.startswith("optimizer.") and one_sided:
        effect = Effect.refused  # only one configuration has the field, so the optimizers differ
    if key == "schemas.optimizer" and before.get(key) in _SAME_STATE and after.get(key) in _SAME_STATE:
        effect = Effect.changes_numbers
    if key == "data.path" and {each.get("schemas.data") for each in (before, after)} == {"tokens_schema"}:
        effect = Effect.safe  # the folder may have moved: data_identity compares the contents
    if key.startswith(_FOLDERS) and one_sided and _share_data(before, after):
        effect = Effect.changes_numbers  # a folder was added to the blend or removed from it
    if key in ("trainer.max_steps", "trainer.max_epochs") and (_follows_length(before) or _follows_length(after)):
        effect = Effect.changes_numbers
    if effect is Effect.refused and load == "weights" and not _tied_to_weights(key, before):
        effect = Effect.changes_numbers
    return effect


def _tied_to_weights(key: str, before: dict[str, Any]) -> bool:
    """Return True if the weights are valid only with the key's old value. False for keys of an unknown tokenizer."""
    if key in _TOKENIZER_KEYS and any(before.get(name, "") in _NO_TOKENIZER for name in _TOKENIZER_KEYS):
        return False
    return any(prefix in _REFUSED_FOR_WEIGHTS for prefix in _prefixes(key))


def _share_data(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return True if both configurations have a folder with the same training tokens."""
    then, now = ({each[k] for k in each if k.startswith(_FOLDERS) and k.endswith(".train")} for each in (before, after))
    return bool(then & now)


def _follows_length(config: dict[str, Any]) -> bool:
    """Return True if a field of the schedule is null, which means that the schedule's length depends on the run's."""
    return any(key.startswith("schedule.") and value is None for key, value in config.items())


def _prefixes(key: str) -> list[str]:
    """Return the dotted prefixes of a key, longest first: `a.b.c`, `a.b`, `a`."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            # YAML stores an enum member by name. With names, a typed configuration equals one that was read from YAML.
            flat[f"{prefix}{name}"] = value.name if isinstance(value, Enum) else value
    return flat


def _line(before: str, differences: list[Difference], after: str) -> str:
    return f"{before}{', '.join(map(str, differences))}: {after}" if differences else ""
