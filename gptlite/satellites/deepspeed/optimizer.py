"""Translation of the optimizer and scheduler of a DeepSpeed JSON. Keys missing from a section that is present have
DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

from gptlite.errors import did_you_mean
from gptlite.satellites.deepspeed import keys
from gptlite.satellites.deepspeed.rows import AUTO, Kind, Only, Section

BEGINS = Only(
    (-1,), "begins the schedule there, after an update at the optimizer's lr, which gptlite does not; remove it"
)


def optimizer(root: Section, peak: float | None) -> None:
    """Add the rows of the optimizer. `peak` is the peak learning rate that the scheduler sets, or None; it replaces the
    optimizer's learning rate."""
    if (section := root.section("optimizer")) is None:
        return
    kind = section.value("type", Kind.text)
    section.apply({"legacy_fusion": (Kind.flag, keys.FASTER)})
    name = (kind or "").lower()
    if name not in keys.OPTIMIZERS:
        section.known.add("params")
        reason = keys.NO_OPTIMIZER.get(name) or f"is not one of {', '.join(keys.OPTIMIZERS)}"
        section.refuse("type", f"{reason}{did_you_mean(name, keys.OPTIMIZERS)}" if kind else "names no optimizer")
        return
    preset, defaults = keys.OPTIMIZERS[name]
    params = section.section("params") or Section({}, section.full("params"), section.rows)
    decoupled = params.value("adam_w_mode", Kind.flag) if name in ("adam", "adamw") else None
    if decoupled is False and name == "adam":
        preset = "adam"
    reason = "adam_w_mode is on" if (name, preset) == ("adam", "adamw") else ""
    section.take("type", _muon_clipping(root) if name == "muon" else reason, optimizer=preset)
    if decoupled is not None:
        params.no_op("adam_w_mode", f"optimizer={preset}")
    params.apply(keys.PARAMS[name])
    defaults = _torch_adam(params, preset, defaults) if name in ("adam", "adamw") else defaults
    left = _rates(params, preset, dict(defaults), peak)
    _clipping(root, params)
    params.close()
    if left:
        overrides = {f"optimizer__{key}": value for key, value in left.items()}
        section.take("other params", "DeepSpeed's defaults", **overrides)
    section.close()


def _muon_clipping(root: Section) -> str:
    """Return the difference of Muon's clipping, if the file has it."""
    zero, norm = root.content.get("zero_optimization"), root.content.get("gradient_clipping")
    clips = isinstance(zero, dict) and zero.get("stage") in (1, 2) and norm != 0
    return "clips gradients; DeepSpeed's stages 1 and 2 clip the orthogonalized update" if clips else ""


def _torch_adam(params: Section, preset: str, defaults: dict[str, float]) -> dict[str, float]:
    """Add the row of torch_adam, which selects torch's optimizer. Return the defaults with its weight decay."""
    if not params.value("torch_adam", Kind.flag) or preset != "adamw":
        params.apply({"torch_adam": (Kind.flag, keys.FASTER)})
        return defaults
    params.no_op("torch_adam", f"torch's AdamW, whose default for weight_decay is {keys.TORCH_DECAY}")
    return defaults | {"weight_decay": keys.TORCH_DECAY}


def _rates(params: Section, preset: str, defaults: dict[str, float], peak: float | None) -> dict[str, Any]:
    """Add the rows of the learning rate, betas, eps and weight decay. Return DeepSpeed's defaults for absent keys."""
    single = ("eps", "weight_decay") if "eps" in defaults else ("weight_decay",)
    for name in single:
        if (value := params.value(name, Kind.number)) is not None:
            params.take(name, "matrices only" if value and name != "eps" else "", **{f"optimizer__{name}": value})
    if "beta1" in defaults and (betas := params.value("betas", Kind.pair)):
        params.take("betas", optimizer__beta1=betas[0], optimizer__beta2=betas[1])
    if preset == "muon":
        defaults |= _muon_rates(params, peak)
    elif peak is not None and params.value("lr", Kind.number) is not None:
        params.no_op("lr", "the scheduler's warmup_max_lr replaces it")
    elif (rate := params.value("lr", Kind.number)) is not None:
        params.take("lr", optimizer__lr=rate)
    if peak is not None:
        defaults.pop("lr", None)
    same = {"beta1": "betas", "beta2": "betas", "min_trust": "min_coeff", "max_trust": "max_coeff"}
    return {key: value for key, value in defaults.items() if params.content.get(same.get(key, key)) is None}


def _muon_rates(params: Section, peak: float | None) -> dict[str, Any]:
    """Add the rows of Muon's learning rates, for matrices and for other parameters. Return further settings
    that make gptlite's Muon match DeepSpeed's."""
    rate, matrices, others = (params.value(name, Kind.number) for name in ("lr", "muon_lr", "adam_lr"))
    ours, theirs = matrices or rate or 0.02, others or rate or 3e-4
    same: dict[str, Any] = {"scale": "original", "newton_schulz": "quintic", "adamw_names": ["embed", "lm_head"]}
    ratio = same | {"adamw_lr_ratio": 1.0}
    if peak is not None or AUTO in (params.content.get(name) for name in ("lr", "muon_lr", "adam_lr")):
        for name in ("lr", "muon_lr", "adam_lr"):
            if params.value(name, Kind.number) is not None:
                params.no_op(name, "not used: the scheduler sets warmup_max_lr, or a rate is auto")
        return ratio
    if rate is not None:
        params.take("lr", **({} if matrices else {"optimizer__lr": ours}))
    if matrices is not None:
        params.take("muon_lr", optimizer__lr=ours)
    if others is not None:
        params.take("adam_lr", f"{theirs:g} / {ours:g}", optimizer__adamw_lr_ratio=theirs / ours)
        return same | {"lr": ours}
    return ratio | {"lr": ours, "adamw_lr_ratio": theirs / ours}


def _clipping(root: Section, params: Section) -> None:
    """Add the row of max_grad_norm, an old form of gradient_clipping."""
    norm, other = params.value("max_grad_norm", Kind.number), root.content.get("gradient_clipping")
    if norm is None:
        return
    if other is None:
        params.take("max_grad_norm", "an old form of gradient_clipping", optimizer__clip_norm=norm)
    elif norm == other:
        params.no_op("max_grad_norm", "an old form of gradient_clipping")
    else:
        params.refuse("max_grad_norm", f"differs from gradient_clipping={other}; remove one")


def default_clipping(root: Section) -> None:
    """Add the row of gradient_clipping if no key sets it."""
    old = any(row.key == "optimizer.params.max_grad_norm" and row.value is not None for row in root.rows)
    if root.content.get("gradient_clipping") is None and not old:
        reason = "DeepSpeed's default since June 2026; the former one is 0, no clipping"
        root.take("gradient_clipping", reason, optimizer__clip_norm=1.0)


def schedule(root: Section) -> float | None:
    """Add the rows of the scheduler. Return the peak learning rate, or None if the scheduler does not set it."""
    if (section := root.section("scheduler")) is None:
        return None
    kind = section.value("type", Kind.text)
    decays = {"WarmupLR": "none", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    section.known.add("params")
    if kind not in decays:
        others = keys.NO_SCHEDULE.get(kind or "") or f"is not one of {', '.join(decays)}"
        section.refuse("type", f"{others}{did_you_mean(kind, decays)}" if kind else "names no scheduler")
        return None
    params = section.section("params") or Section({}, section.full("params"), section.rows)
    _warmup(params)
    if kind != "WarmupLR" and (total := params.value("total_num_steps", Kind.count)) is not None:
        params.take("total_num_steps", schedule__decay_steps=total, trainer__max_steps=total)
    elif kind != "WarmupLR" and "total_num_steps" not in params.content:
        params.no_op("total_num_steps", "the decay ends at trainer.max_steps")
    peak, first = None, 0.0
    if kind == "WarmupCosineLR":
        low = params.value("warmup_min_ratio", Kind.number)
        end = params.value("cos_min_ratio", Kind.number)
        if low is not None:
            params.take("warmup_min_ratio", schedule__min_ratio=low)
        if end is not None or params.content.get("cos_min_ratio") is None:
            params.take("cos_min_ratio", schedule__end_ratio=0.0001 if end is None else end)
    else:
        peak, first = _rise(params, kind)
    decay = {"schedule__decay": decays[kind]} if kind != "WarmupLR" else {}
    section.take("type", keys.FIRST, schedule="warmup", **decay, schedule__first_ratio=first)
    params.close()
    section.close()
    return peak


def _warmup(params: Section) -> None:
    """Add the rows of the warmup's length and shape."""
    steps = params.value("warmup_num_steps", Kind.integer)
    if steps is not None and steps < 1:
        params.refuse("warmup_num_steps", "must be at least 1, as in DeepSpeed 0.19")
    elif steps is not None or params.content.get("warmup_num_steps") is None:
        steps = 1000 if steps is None else steps
        params.take("warmup_num_steps", "at least 2" if steps < 2 else "", schedule__warmup_steps=max(2, steps))
    shape = params.value("warmup_type", Kind.text)
    if shape in ("log", "linear"):
        params.take("warmup_type", schedule__log=shape == "log")
    elif shape is not None:
        params.refuse("warmup_type", f"is neither log nor linear{did_you_mean(shape, ('log', 'linear'))}")
    params.apply({"last_batch_iteration": (Kind.integer, BEGINS)})


def _rise(params: Section, kind: str) -> tuple[float | None, float]:
    """Add the rows of the lowest and the peak learning rate. Return the peak and the first factor of it."""
    peak, low = params.value("warmup_max_lr", Kind.number), params.value("warmup_min_lr", Kind.number)
    if peak is None and "warmup_max_lr" not in params.content and kind == "WarmupDecayLR":
        peak = 0.001
    if peak is not None:
        params.take("warmup_max_lr", optimizer__lr=peak)
    if not low:
        if low is not None:
            params.take("warmup_min_lr", schedule__min_ratio=0.0)
    elif not peak or not 0 < low <= peak:
        params.refuse("warmup_min_lr", "needs a warmup_max_lr above it" if peak else "needs a number as warmup_max_lr")
    else:
        end = {"schedule__end_ratio": low / peak} if kind == "WarmupDecayLR" else {}
        params.take("warmup_min_lr", f"{low:g} / {peak:g}", schedule__min_ratio=low / peak, **end)
        return peak, low / peak
    return peak, 0.0
