"""Grammar of the fuzz: the keys that change numbers or layouts, with the values that are drawn.

A draw maps the name of every axis to one of its values, written as the overrides that it adds to BASE; an empty value
is the default. Values without effect are left out by `effective`, so that two draws with other names are other runs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GLOBAL_BATCH = 48
LARGEST_WORLD = 8  # ranks on one machine
P, M = "parallelism.", "model."
# The learning rate is one of a warm-up: at its peak in the first step, Adam would make 5e-5 of a gradient out of
# rounding. Clipping and weight decay are strong enough to be seen beside the limits.
BASE = tuple(
    f"""
data=synthetic data.vocab_size=37 data.num_tokens=20000 data.global_batch_size={GLOBAL_BATCH} data.sequence_length=16
model=gpt-lite {M}num_layers=2 {M}num_heads=8 {M}d_model=32 {M}sequence_length=16 {M}vocab_multiple=64 {M}dropout=0.1
precision=fp32 schedule=constant schedule.warmup_steps=9 optimizer.lr=1e-3 optimizer.clip_norm=0.5
optimizer.weight_decay=10 trainer.max_steps=1000 run.dir=unused run.name=fuzz
""".split()
)

Draw = dict[str, str]  # {axis: overrides}


@dataclass(frozen=True)
class DrawAxis:
    """One axis of the grammar. `values` begins with the default; `model` is True if one process needs the value too.

    `when` tells whether a value other than the default has an effect, and `on` names the axes that decide this.
    """

    name: str
    values: tuple[str, ...]
    model: bool = False
    when: Callable[[Draw], bool] = lambda draw: True
    on: tuple[str, ...] = ()


def number(draw: Draw, axis: str) -> int:
    """Return the value of an axis with numbers, such as a degree, or 1 for the default."""
    return int(draw[axis].rpartition("=")[2] or 1)


def fsdp_size(draw: Draw) -> int:
    """Return the number of ranks whose gradients are summed."""
    return number(draw, "data") * number(draw, "context")


def world(draw: Draw) -> int:
    """Return the number of ranks of a draw."""
    return math.prod(number(draw, axis) for axis in DEGREES)


def _key(key: str, *values: object) -> tuple[str, ...]:
    return "", *(f"{key}={value}" for value in values)


def _given(axis: str) -> Callable[[Draw], bool]:
    return lambda draw: draw[axis] != ""


def _has(axis: str, *words: str) -> Callable[[Draw], bool]:
    return lambda draw: any(word in draw[axis] for word in words)


def _moe(key: str, *values: object) -> DrawAxis:
    return DrawAxis(f"moe_{key}", _key(f"model.moe.{key}", *values), True, _given("experts"), ("experts",))


DEGREES = ("tensor", "pipeline", "context", "data")
NVME = f"{P}offload=nvme {P}offload_buffer_mib=1 {P}offload_path={tempfile.gettempdir()}"
LAYOUT = (
    DrawAxis("tensor", _key(f"{P}tensor", 2, 4, 8, 3)),
    DrawAxis("pipeline", _key(f"{P}pipeline", 2, 4, 3)),
    DrawAxis("context", _key(f"{P}context", 2, 4)),
    DrawAxis("data", _key(f"{P}data", 2, 4, 3, 8)),
    DrawAxis("replicate", _key(f"{P}dp_replicate", 2, 4)),
    DrawAxis("expert", _key(f"{P}expert", 2, 4)),
    DrawAxis("zero", _key(f"{P}zero", 3, 1, 2), when=lambda draw: fsdp_size(draw) > 1, on=("data", "context")),
    DrawAxis("schedule", _key(f"{P}schedule", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv"), False,
         _given("pipeline"), ("pipeline",)),
    DrawAxis("virtual_stages", _key(f"{P}virtual_stages", 1, 2, 4), False, _given("pipeline"), ("pipeline",)),
    DrawAxis("sequence", _key(f"{P}sequence", "true")),
    DrawAxis("accumulation", _key("accumulation", 2, 3, 4, 8)),
    DrawAxis("checkpointing", _key(f"{P}activation_checkpointing", "full", "selective", "offload")),
    DrawAxis("bucket_layers", _key(f"{P}bucket_layers", 2, 3), False, lambda draw: fsdp_size(draw) > 1,
         ("data", "context")),
    DrawAxis("prefetch", _key(f"{P}prefetch", 0, 2), False, _has("zero", "=3"), ("zero",)),
    DrawAxis("offload", ("", f"{P}offload=cpu", NVME)),
    DrawAxis("offload_parameters", _key(f"{P}offload_parameters", "true")),
    DrawAxis("secondary", ("", f"{P}zeropp.secondary=true {P}zeropp.node_size=2")),
    DrawAxis("noise_scale", _key("trainer.noise_scale", "true")),
    DrawAxis("spike", _key("trainer.spike.policy", "skip")),
)  # fmt: skip
MODEL = (
    DrawAxis("layers", _key(f"{M}num_layers", 4, 8, 3)),
    DrawAxis("heads", ("", f"{M}num_heads=6 {M}d_model=48", f"{M}num_heads=16 {M}head_dim=4", f"{M}head_dim=6")),
    DrawAxis("kv_heads", _key(f"{M}kv_heads", 2, 4, 1)),
    DrawAxis("length", ("", f"data.sequence_length=24 {M}sequence_length=24", "data.sequence_length=8")),
    DrawAxis("position", _key(f"{M}position", "rope")),
    DrawAxis("rope_scaling", _key(f"{M}rope_scaling", 4), when=_given("position"), on=("position",)),
    DrawAxis("norm", ("", f"{M}norm=rms_norm", f"{M}norm=rms_norm {M}norm_gain=false")),
    DrawAxis("mlp", _key(f"{M}mlp", "swiglu", "geglu", "relu2", "relu", "gelu_erf")),
    DrawAxis("d_ff", _key(f"{M}d_ff", 96)),
    DrawAxis("windows", _key(f"{M}windows", "[5,0]")),
    DrawAxis("value_residual", _key(f"{M}value_residual", "true")),
    DrawAxis("qk_norm", ("", f"{M}qk_norm=true", f"{M}qk_norm=true {M}qk_norm_heads=false")),
    DrawAxis("bias", _key(f"{M}bias", "false")),
    DrawAxis("dropout", _key(f"{M}dropout", "0.0")),
    DrawAxis("tied", _key(f"{M}tied_embeddings", "false")),
    DrawAxis("vocabulary", ("", f"{M}vocab_multiple=1", f"data.vocab_size=9 {M}vocab_multiple=1")),
    DrawAxis("softcap", _key(f"{M}softcap", 15)),
    DrawAxis("z_loss", _key(f"{M}z_loss", 0.01)),
    # With one expert of weight 1, the router would have no gradient but rounding.
    DrawAxis("experts", (*_key(f"{M}moe.experts", 8), f"{M}moe.experts=4 {M}moe.top_k=1 {M}moe.renormalize=false")),
    _moe("d_ff", 16),
    _moe("shared", 1),
    _moe("every", 2),
    _moe("score", "sigmoid"),
    _moe("renormalize", "false"),
    _moe("bias_rate", "0.0", 0.01),
    _moe("sequence_loss", 0.1),
    _moe("z_loss", 0.01),
    DrawAxis("precision", _key("precision", "bf16", "fp16", "amp_o1", "amp_o2")),
    DrawAxis("loss_scale", ("", "precision.loss_scale=1024", "precision.loss_scale_rule=deepspeed"), True,
         _has("precision", "fp16", "amp"), ("precision",)),
    DrawAxis("optimizer", _key("optimizer", "muon", "sgd", "adam", "lion", "lamb", "adafactor")),
    DrawAxis("nesterov", _key("optimizer.nesterov", "true"), True, _has("optimizer", "sgd"), ("optimizer",)),
    DrawAxis("momentum", _key("optimizer.momentum", "0.0"), True, _has("optimizer", "sgd", "muon"), ("optimizer",)),
    DrawAxis("muon_scale", _key("optimizer.scale", "original"), True, _has("optimizer", "muon"), ("optimizer",)),
    DrawAxis("clip_norm", _key("optimizer.clip_norm", "0.0")),
    DrawAxis("weight_decay", _key("optimizer.weight_decay", "0.0")),
    DrawAxis("packing", _key("data.packing", "documents")),
    DrawAxis("batch_ramp", _key("data.batch_ramp", "[24,24,48]")),
    DrawAxis("ops", _key("ops", "reference")),
    DrawAxis("attention", _key("ops.attention", "sdpa", "matmul")),
    DrawAxis("cross_entropy", _key("ops.cross_entropy", "chunked", "reference")),
    DrawAxis("seed", _key("seed", 5)),
)  # fmt: skip
AXES = {axis.name: axis for axis in (*LAYOUT, *MODEL)}
MODEL_AXES = frozenset(axis.name for axis in MODEL)
DEFAULT: Draw = dict.fromkeys(AXES, "")


def effective(draw: Draw) -> Draw:
    """Return the draw without values that have no effect."""
    return {name: value if AXES[name].when(draw) else "" for name, value in draw.items()}


def overrides(draw: Draw) -> list[str]:
    """Return the overrides of the run, without those of BASE that they replace.

    The accumulation becomes a micro-batch size. Where it does not divide the batch, the size is rounded down, and left
    to the program to refuse.
    """
    first = 24 if draw["batch_ramp"] else GLOBAL_BATCH
    parts = number(draw, "data") * number(draw, "accumulation")
    values = [f"data.micro_batch_size={max(1, first // parts)}", f"parallelism.data={number(draw, 'data')}"]
    drawn = [each for name, value in draw.items() if name not in ("data", "accumulation") for each in value.split()]
    return replaced([*values, *drawn])


def model_overrides(draw: Draw, precision: str = "") -> list[str]:
    """Return the overrides of the one process that a draw is compared with, in another `precision` if one is given."""
    drawn = [each for name in draw if name in MODEL_AXES for each in draw[name].split()]
    if precision:
        drawn = [each for each in drawn if not each.startswith("precision")] + [f"precision={precision}"]
    return replaced([f"data.micro_batch_size={24 if draw['batch_ramp'] else GLOBAL_BATCH}", *drawn])


def replaced(values: Sequence[str]) -> list[str]:
    """Return BASE with these values in the place of its own, and the others after them."""
    return list({each.partition("=")[0]: each for each in (*BASE, *values)}.values())


def row_name(draw: Draw) -> str:
    """Return the name of a draw's row in the table of layouts: the layout, then all other values that are drawn.

    The names are those of the matrix of the tests: `tp2-sp-pp2-zbv-cp2-dp4x2-zero3-acc4-...`.
    """
    shown = [f"tp{number(draw, 'tensor')}" + ("-sp" if draw["sequence"] else "")]
    shown += [f"pp{number(draw, 'pipeline')}"]
    shown += [draw["schedule"].rpartition("=")[2] or "1f1b"] if draw["pipeline"] else []
    shown += [f"cp{number(draw, 'context')}"] if draw["context"] else []
    copies = f"x{number(draw, 'replicate')}" if draw["replicate"] else ""
    shown += [f"dp{number(draw, 'data')}{copies}", f"zero{int(draw['zero'].rpartition('=')[2] or 0)}"]
    shown += [f"acc{number(draw, 'accumulation')}", draw["precision"].rpartition("=")[2] or "fp32"]
    said = {*DEGREES, "sequence", "schedule", "replicate", "zero", "accumulation", "precision"}
    kept = dict.fromkeys(each for name in draw if name not in said for each in draw[name].split())
    prefixes = {"model.moe": "moe_", "parallelism.zeropp": "zeropp_"}
    for key, _, value in (each.partition("=") for each in kept):
        if key not in (f"{P}offload_path", f"{P}offload_buffer_mib"):
            section, _, name = key.rpartition(".")
            shown.append(f"{prefixes.get(section, '')}{name}_{value.strip('[]').replace(',', '_')}")
    return "-".join(shown)
