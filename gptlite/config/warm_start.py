"""Model configuration of runs that start from a checkpoint's weights. Does not import torch."""

from __future__ import annotations

from gptlite import limits
from gptlite.config.overrides import values_of
from gptlite.config.plugins import PluginsNotNamed
from gptlite.config.saved import from_yaml, leaves, override_value
from gptlite.config.schema import schema_names
from gptlite.documents import read_text
from gptlite.progress import Log


def with_model(overrides: list[str], log: Log | None = None) -> list[str]:
    """Prepend overrides that copy the model from the checkpoint whose weights a run starts from."""
    found = model_overrides(overrides)
    if found and log:
        log("model: taken from the checkpoint, since checkpoint.load=weights")
    return [*found, *overrides]


def model_overrides(overrides: list[str]) -> list[str]:
    """Return `optimizer=PRESET` and `model.KEY=VALUE` of the checkpoint named by checkpoint.resume, without keys that
    are in `overrides`.

    Return [] unless `overrides` have checkpoint.load=weights and the path of a checkpoint. Also return [] if they set
    model=PRESET, which the run compares with the checkpoint, and if the checkpoint cannot be read; then the run
    raises the error. Raises PluginsNotNamed if the checkpoint's plugins have not been imported.
    """
    settings = values_of(overrides)
    resume = settings.get("checkpoint.resume", "auto")
    if settings.get("checkpoint.load") != "weights" or resume in ("auto", "never") or "model" in settings:
        return []
    from gptlite.checkpoint.find import candidates  # imported only if needed, to keep composition fast

    try:
        text = read_text(candidates(resume, "checkpoint.resume")[0] / "config.yaml", limits.YAML_BYTES)
        saved = from_yaml(text, f"checkpoint.resume={resume}")
    except PluginsNotNamed:
        raise
    except (OSError, ValueError):
        return []
    model, optimizer = saved.model, schema_names(saved)["optimizer"].removesuffix("_schema")
    values = [f"model.{key}={override_value(value)}" for key, value in leaves(model) if f"model.{key}" not in settings]
    # The optimizer is copied too, since the model's preset, which is not copied, may have chosen it.
    return [*([f"optimizer={optimizer}"] if "optimizer" not in settings else []), *values]
