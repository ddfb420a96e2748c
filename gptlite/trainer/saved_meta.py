"""Description of `meta` in a checkpoint's manifest, as `TrainState.meta` writes it."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from gptlite.data.eras import Era, check_eras
from gptlite.data.order_log import Range
from gptlite.documents import Between, Count, DocumentError, Matching, checked
from gptlite.errors import ConfigError

_Length = Annotated[str, Matching("[1-9][0-9]{0,9}", "a length in digits")] | Count


class _Scale(TypedDict):
    scale: Annotated[float, Between(2.0**-100, 2.0**100)]
    good_steps: Count
    overflows: Count
    skipped: Count


class _Seen(TypedDict):
    steps: list[Annotated[list[float], Between(2, 2)]]
    high: list[Annotated[list[float], Between(2, 2)]]
    rewinds: Count


class _Noise(TypedDict):
    gained: float
    variance: float
    square: float
    weight: float
    base: float | None
    grown: NotRequired[list[Range]]  # of BatchSchedule


class _Meta(TypedDict):
    step: Count
    consumed_samples: Count
    tokens: Count
    best_val_loss: float | None
    evaluated_step: Count
    wandb_id: Annotated[str, Matching(r"[\w-]{1,128}", "an id of W&B")] | None
    data_identity: dict[str, Any]
    data_order: NotRequired[list[Era] | None]
    loss_scale: NotRequired[_Scale | None]
    skipped_samples: NotRequired[list[Range]]
    spikes: NotRequired[_Seen | None]
    noise: NotRequired[_Noise | None]


def checked_meta(meta: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's `meta`, with its eras as objects. Raises ConfigError for a value that no run writes."""
    try:
        converted = checked(meta, _Meta)
        if eras := converted.get("data_order"):
            check_eras(eras, "data_order")
        elif "sequence_length" in meta["data_identity"]:
            checked(meta["data_identity"]["sequence_length"], _Length, "data_identity.sequence_length")
    except DocumentError as error:
        raise ConfigError(
            f"the checkpoint's MANIFEST.json is of no run: meta.{error}; use another checkpoint"
        ) from None
    return converted
