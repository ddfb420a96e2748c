"""Stage `state`: a checkpoint of the layout has each element of the training state once, and nothing is missing."""

from __future__ import annotations

from pathlib import Path

from gptlite.checkpoint.manifest import DamagedCheckpoint, in_words, verify
from gptlite.checkpoint.metadata import boxes_of, read_metadata
from gptlite.config.schema import Config
from gptlite.models.model import Model
from gptlite.parallelism.reduction import PREFIX
from gptlite.precision import Precision
from gptlite.satellites.certify.rows import StageRow
from gptlite.satellites.certify.shrink import built

COUNTERS = "step", "consumed_samples", "tokens"


def check_state(config: Config, whole: Path | None, single: Path | None) -> StageRow:
    """Compare the checkpoint `whole` of a layout with the model's names and with the checkpoint of one process."""
    if whole is None or single is None:
        return StageRow("state", None, "there is no checkpoint, as the stage resume failed")
    try:
        manifest, alone = (verify(each, lambda _: None) for each in (whole, single))
        metadata = read_metadata(whole, manifest)  # refuses gaps and overlaps of the boxes of a tensor
    except DamagedCheckpoint as error:
        return StageRow("state", False, error.reason)
    ours = {key: entry for key, entry in manifest.tensors.items() if not key.startswith(PREFIX)}
    theirs = {key: entry for key, entry in alone.tensors.items() if not key.startswith(PREFIX)}
    named = names_of(config)
    wrong = [f"{key} is missing" for key in [*named, *theirs] if key not in ours]
    wrong += [f"{key} is in no run of one process" for key in ours if key not in theirs]
    wrong += [
        f"{key} is {in_words(ours[key])}, and {in_words(theirs[key])} in a run of one process"
        for key in ours.keys() & theirs.keys()
        if ours[key] != theirs[key]
    ]
    held = {key.removeprefix("optim.").rpartition(".")[0] for key in ours if key.startswith("optim.")}
    wrong += [
        f"{key} has no optimizer state" for key in named if held and named[key] and key[len("model.") :] not in held
    ]
    wrong += [
        f"{key} is {manifest.meta.get(key)}, and {alone.meta.get(key)} in a run of one process"
        for key in (*COUNTERS, "data_order")
        if manifest.meta.get(key) != alone.meta.get(key)
    ]
    if config.precision.dtype is Precision.fp16 and not manifest.meta.get("loss_scale"):
        wrong.append("the loss scale is missing")
    if wrong:
        return StageRow("state", False, f"{wrong[0]}{f', and {len(wrong) - 1} more' if wrong[1:] else ''}")
    boxes = [box for key in manifest.tensors for box in boxes_of(metadata, key)]
    owners = len({place.relative_path for _, place in boxes})
    words = f"{len(ours)} tensors in {len(boxes)} boxes of {owners} ranks, each element once, none missing"
    return StageRow("state", True, f"{words}; sampler at {manifest.meta['consumed_samples']}")


def names_of(config: Config) -> dict[str, bool]:
    """Return the checkpoint's keys of a model's parameters and buffers, each with True for a trained parameter."""
    model = Model.of(config.model)
    whole = built(model.spec, config.model)
    weights = {f"model.{name}": weight.requires_grad for name, weight in model.named_weights(whole)}
    return weights | {f"model.{name}": False for name, _ in model.named_buffers(whole)}
