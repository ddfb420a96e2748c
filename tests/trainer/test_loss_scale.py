"""The loss scale: its rule against other implementations, and what it does to a run."""

import json
import math
import random
from contextlib import closing
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from unittest import mock

import pytest
import torch
from marking import marked
from run_files import checkpoint, differing, meta, read_metrics

from gptlite import load
from gptlite.errors import ConfigError
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import LossScaleRule, Policy, Precision, PrecisionConfig
from gptlite.satellites.deepspeed.expand import overrides_of
from gptlite.satellites.deepspeed.translate import translate
from gptlite.satellites.parity.record import build
from gptlite.trainer.loss_scale import LossScaler, build_scaler
from gptlite.trainer.steps import lag_of

CPU = torch.device("cpu")
OVERFLOWING = ["precision=fp16", "precision.initial_scale_power=32", "precision.hysteresis=1"]


def scales(scaler: LossScaler, events: str) -> list[float]:
    """The scale after each step: `.` a good one, `x` one that overflowed."""
    result = []
    for event in events:
        scaler.update(event == "x")
        result.append(scaler.scale)
    return result


# Worked by hand from Megatron's rule: an overflow uses up hysteresis, which only growth gives back.
@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("...", [8, 8, 16]),
        ("......", [8, 8, 16, 16, 16, 32]),
        ("..x...", [8, 8, 8, 8, 8, 16]),  # the count of good steps begins anew
        ("xx", [8, 4]),
        ("xxxxxx", [8, 4, 2, 1, 1, 1]),
        ("x.x.x.", [8, 8, 4, 4, 2, 2]),  # good steps alone give nothing back
        ("xx...xx", [8, 4, 4, 4, 8, 8, 4]),  # growth does
    ],
)
def test_the_rule_by_hand(events, expected):
    assert scales(LossScaler(8.0, window=3, hysteresis=2, minimum=1.0, factor=2.0), events) == expected


def megatron(events: str, scale: float, window: int, hysteresis: int, minimum: float) -> list[float]:
    """What the DynamicGradScaler of megatron-core gives, which keeps its numbers on a GPU: here, on the CPU."""
    package = find_spec("megatron.core")
    assert package is not None
    assert package.origin is not None
    spec = spec_from_file_location("grad_scaler", Path(package.origin).parent / "optimizer" / "grad_scaler.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    on_cpu = partial(torch.tensor, device="cpu")
    with mock.patch.object(torch, "tensor", lambda *values, device, **options: on_cpu(*values, **options)):
        theirs = module.DynamicGradScaler(scale, minimum, 2.0, 0.5, window, hysteresis)
    result = []
    for event in events:
        theirs.update(event == "x")
        result.append(theirs.scale.item())
    return result


def deepspeed(events: str, scale: float, window: int, hysteresis: int, minimum: float) -> list[float]:
    """DeepSpeed's rule as it is stated there, by the numbers of iterations and of the last that overflowed."""
    last_overflow, left, result = -1, hysteresis, []
    for iteration, event in enumerate(events):
        if event == "x":
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            last_overflow = iteration
        elif (stable := iteration - last_overflow - 1) > 0 and stable % window == 0:
            left = hysteresis
            scale *= 2
        result.append(scale)
    return result


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_rule_is_megatrons(window, hysteresis):
    rng = random.Random(0)
    events = "".join(rng.choices(".x", weights=(3, 1), k=90))  # theirs is a float32
    scaler = LossScaler(1024.0, window, hysteresis, minimum=2.0, factor=2.0)
    assert scales(scaler, events) == megatron(events, 1024.0, window, hysteresis, 2.0)


# `cur_scale` of DeepSpeed 0.19.8's DynamicLossScaler (deepspeed/runtime/fp16/loss_scaler.py) after each step, with
# init_scale=8, scale_window=3, delayed_shift=2 (fp16.hysteresis) and min_scale=1.
@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("..........", [8, 8, 8, 16, 16, 16, 32, 32, 32, 64]),  # only the first increase is a step later
        ("..x.....", [8, 8, 8, 8, 8, 8, 16, 16]),
        ("xx.......xx", [8, 4, 4, 4, 4, 8, 8, 8, 16, 16, 8]),
        ("x.x.x.", [8, 8, 4, 4, 2, 2]),
        ("xxxxxx", [8, 4, 2, 1, 1, 1]),
    ],
)
def test_deepspeeds_rule_by_its_own_values(events, expected):
    assert scales(LossScaler(8.0, 3, 2, minimum=1.0, factor=2.0, deepspeed=True), events) == expected


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_with_deepspeed_the_rule_is_deepspeeds(window, hysteresis):
    events = "".join(random.Random(0).choices(".x", weights=(4, 1), k=200))
    scaler = LossScaler(1024.0, window, hysteresis, minimum=2.0, factor=2.0, deepspeed=True)
    assert scales(scaler, events) == deepspeed(events, 1024.0, window, hysteresis, 2.0)


def test_a_resumed_scale_grows_under_another_rule_or_a_shorter_window():
    for window, by_deepspeed in ((3, False), (2, True), (1, False)):
        scaler = LossScaler(8.0, window, 1, minimum=1.0, factor=2.0, deepspeed=by_deepspeed)
        scaler.load_meta({"scale": 8.0, "good_steps": 3, "overflows": 0, "skipped": 0})
        values, _ = scaler.advanced(scaler.on_device(CPU), torch.tensor(False))
        assert (scales(scaler, "."), values[0].item()) == ([16.0], 16.0)


def test_without_hysteresis_the_rule_is_torchs():
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    optimizer, expected = torch.optim.SGD([weight], lr=0.0), []
    events = "....x.xx.....x...." * 3
    for event in events:
        weight.grad = torch.full((1,), math.inf if event == "x" else 1.0)
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        expected.append(theirs.get_scale())
    assert scales(LossScaler(2.0**10, 4, 1, minimum=2.0**-20, factor=2.0), events) == expected


def test_an_overflow_is_the_last_where_the_scale_is_least_and_hysteresis_used_up():
    scaler = LossScaler(2.0, window=9, hysteresis=2, minimum=1.0, factor=2.0)
    seen = []
    for _ in range(2):
        seen.append(scaler.exhausted)
        scaler.update(overflow=True)
    assert (seen, scaler.scale, scaler.exhausted, scaler.skipped) == ([False] * 2, 1.0, True, 2)


def test_only_fp16_precisions_have_a_loss_scale():
    config = PrecisionConfig(Precision.fp16, initial_scale_power=5)
    for dtype, precision in ((torch.float32, Precision.fp32), (torch.bfloat16, Precision.bf16)):
        assert build_scaler(config, Policy(dtype, "", precision)) is None
    for precision in (Precision.fp16, Precision.amp_o1, Precision.amp_o2):
        scaler = build_scaler(config, Policy(torch.float16, "", precision))
        assert scaler == LossScaler(32.0, 1000, 2, 1.0, 2.0)
    static = build_scaler(PrecisionConfig(Precision.fp16, loss_scale=96.0), Policy(torch.float16, "", Precision.fp16))
    assert static is not None
    assert scales(static, "x" + "." * 1001) == [96.0] * 1002
    theirs = PrecisionConfig(Precision.fp16, loss_scale_rule=LossScaleRule.deepspeed)
    scaler = build_scaler(theirs, Policy(torch.float16, "", Precision.fp16))
    assert scaler == LossScaler(2.0**16, 1000, 2, 1.0, 2.0, deepspeed=True)
    optimizer = build_optimizer(AdamWConfig(), [("weight", torch.nn.Parameter(torch.ones(2)))], fused_adam=True)
    assert lag_of(optimizer, CPU, 1) == 1
    assert lag_of(optimizer, CPU, 1, scaler) == 0  # the next rate depends on whether this step is skipped


# Of a run of DeepSpeed 0.19.8 with ZeRO 1 and this JSON on a CPU: which of 40 updates overflowed, and before each one
# its learning rate in thousandths and the binary logarithm of its loss scale.
EVENTS = "xxxxxxx...x......xx.........xx.........x"
RATES = [*[0] * 9, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9, *[10] * 19]
POWERS = [24, 24, 23, 22, 21, 20, 19, *[18] * 4, *[17] * 6, 18, 18, *[17] * 6, *[18] * 5, *[17] * 6, *[18] * 4]
JSON = {
    "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 5},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"},
    },
}


def test_rates_and_scales_of_skipped_steps_are_deepspeeds(tiny, tmp_path):
    """Each step's overflow is DeepSpeed's; rates and scales follow from it."""
    config = load([*tiny, *overrides_of(translate(JSON)), f"run.dir={tmp_path}", "run.name=x", "trainer.max_steps=90"])
    state, _ = build(config, Mesh(CPU))
    state.loader.close()
    scaler, rates, powers = state.scaler, [], []
    for state.step, event in enumerate(EVENTS):
        rates.append(config.optimizer.lr * state.schedule.factor(state.schedule_step))
        powers.append(math.log2(scaler.scale))
        scaler.update(event == "x")
    assert rates == pytest.approx([rate / 1000 for rate in RATES])
    assert powers == POWERS


def test_with_deepspeed_a_skipped_step_does_not_advance_the_schedule(run, tmp_path):
    options = [*OVERFLOWING, "trainer.max_steps=16", "schedule.warmup_steps=10", "precision.loss_scale_rule=deepspeed"]
    assert run("whole", *options)[0] == 0
    run("cut", *options, "trainer.stop_step=9")
    assert run("cut", *options, "trainer.stop_step=null")[0] == 0
    rows = [row for row in read_metrics(tmp_path / "whole") if "loss" in row]
    taken, step = 0, rows[0]["lr"]
    for row in rows:
        assert row["lr"] == pytest.approx(step * min(taken + 1, 11))
        taken += row["grad_norm"] is not None
    assert 0 < taken < len(rows)
    assert differing(tmp_path / "whole", tmp_path / "cut", 16) == []


@pytest.mark.parametrize(
    "options",
    ["optimizer=adamw", "optimizer=adamw ops.adamw=reference", "optimizer=adam", "optimizer=sgd"],
    ids=lambda text: text.split(".")[-1],
)
@pytest.mark.parametrize("clip", [0.0, 0.5], ids=["unclipped", "clipped"])
def test_a_power_of_two_changes_no_bit_of_an_fp32_step(tiny, tmp_path, options, clip):
    """The loss is multiplied and the gradients divided: in fp32, where nothing overflows, that is exact."""
    config = load([*tiny, *options.split(), f"optimizer.clip_norm={clip}", f"run.dir={tmp_path}", "run.name=x"])

    def train(scaler):
        state, take_step = build(config, Mesh(CPU))
        state.scaler = scaler
        with closing(state.loader):
            results = [take_step(state) for _ in range(3)]
        return [(r.loss, r.grad_norm, r.lr) for r in results], [p.detach() for p in state.weights()]

    plain, weights = train(None)
    scaled, scaled_weights = train(LossScaler(2.0**12, 2, 2, 1.0, 2.0))
    assert scaled == plain
    assert all(torch.equal(a, b) for a, b in zip(weights, scaled_weights, strict=True))


def test_a_skipped_step_counts_but_for_adam(run, tmp_path):
    code, _ = run(
        "a", *OVERFLOWING, "trainer.max_steps=24", "precision.loss_scale_window=3", "schedule.warmup_steps=20"
    )
    assert code == 0
    rows = [row for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert [row["tokens"] for row in rows] == [4 * 32 * step for step in range(1, 25)]
    assert [row["lr"] for row in rows[:20]] == pytest.approx([rows[0]["lr"] * step for step in range(1, 21)])
    assert all(row["loss"] == pytest.approx(math.log(257), rel=0.05) for row in rows[:3])  # without the scale

    over = [row["grad_norm"] is None for row in rows]
    falls = over.index(False)
    assert 5 < falls < 20
    assert [row["loss_scale"] for row in rows[: falls + 1]] == [2.0 ** (32 - i) for i in range(falls + 1)]
    expected = [rows[falls]["loss_scale"]]
    scaler = LossScaler(expected[0], 3, 1, 1.0, 2.0)
    for skipped in over[falls:-1]:
        scaler.update(skipped)
        expected.append(scaler.scale)
    assert [row["loss_scale"] for row in rows[falls:]] == expected
    assert [row["skipped_steps"] for row in rows] == [sum(over[:step]) for step in range(1, 25)]

    log = (tmp_path / "a" / "train.log").read_text()
    assert log.count(" is skipped: overflow ") == sum(over)
    assert "step 1 is skipped: overflow at loss scale 4.29497e+09, which is now 2.14748e+09" in log
    stored, kept = checkpoint(tmp_path / "a", 24)
    steps = {value.item() for key, value in stored.items() if key.startswith("optim.") and key.endswith(".step")}
    assert steps == {24 - sum(over)}
    assert kept["consumed_samples"] == 24 * 4
    assert kept["loss_scale"]["skipped"] == sum(over)


def test_nothing_changes_in_a_skipped_step(tiny, tmp_path):
    config = load([*tiny, *OVERFLOWING, f"run.dir={tmp_path}", "run.name=x"])
    state, take_step = build(config, Mesh(CPU))
    before = {key: value.clone() for key, value in state.tensors().items()}
    with closing(state.loader):
        result = take_step(state)
    assert result.skipped
    assert all(torch.equal(value, before[key]) for key, value in state.tensors().items())
    assert all(p.grad is None for p in state.weights())
    assert (state.step, state.consumed_samples) == (1, 4)


@pytest.mark.parametrize(
    "options",
    [[*OVERFLOWING, "precision.min_loss_scale=2147483648"], ["precision=amp_o2", "precision.loss_scale=4294967296"]],
    ids=["dynamic", "static"],
)
def test_an_overflow_at_the_least_scale_ends_the_run(run, tmp_path, options):
    code, _ = run("a", *options)
    assert code == 1
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    least = 2**31 if options[0] == "precision=fp16" else 2**32
    assert result["step"] == 1  # one overflow was answered, by the scale or by hysteresis
    assert f"at loss scale {least:g}, which cannot be reduced further" in result["status"]


@pytest.mark.parametrize("precision", marked(["fp16", "amp_o1", "amp_o2"], quick=1, slow=2))
def test_resuming_within_a_window_is_bit_exact(run, tmp_path, precision):
    options = [f"precision={precision}", "precision.loss_scale_window=3", "trainer.max_steps=7"]
    run("whole", *options)
    run("cut", *options, "trainer.max_steps=5")
    assert meta(tmp_path / "cut", 5)["loss_scale"]["good_steps"] == 2
    run("cut", *options)
    whole, cut = (meta(tmp_path / name, 7) for name in ("whole", "cut"))
    assert whole["loss_scale"] == cut["loss_scale"]
    assert differing(tmp_path / "whole", tmp_path / "cut", 7) == []
    found = [
        [(row["loss"], row["grad_norm"], row["loss_scale"]) for row in read_metrics(tmp_path / name) if "loss" in row]
        for name in ("whole", "cut")
    ]
    assert found[0] == found[1]
    assert [scale for *_, scale in found[0]] == [2.0**16] * 3 + [2.0**17] * 3 + [2.0**18]


@pytest.mark.slow
def test_to_and_from_a_precision_without_a_scale(run, tmp_path):
    run("a", "trainer.max_steps=2", "precision=fp32")
    run("a", "trainer.max_steps=4", "precision=fp16", "precision.initial_scale_power=10")
    run("a", "trainer.max_steps=6", "precision=fp32")
    log = (tmp_path / "a" / "train.log").read_text()
    assert "the checkpoint has no loss scale; the loss scale starts at 1024" in log
    assert "the checkpoint's loss scale, 1024, is ignored; only fp16 uses it" in log
    rows = [row for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert [row.get("loss_scale") for row in rows] == [None, None, 1024, 1024, None, None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("precision=fp16 precision.initial_scale_power=40", "precision.initial_scale_power=40 must be 0 to 32"),
        ("precision=fp16 precision.loss_scale=-1", "precision.loss_scale=-1 must be 0 (dynamic)"),
        ("precision=fp16 precision.loss_scale_window=0", "precision.loss_scale_window=0 must be at least 1"),
        ("precision=amp_o1 precision.hysteresis=0", "precision.hysteresis=0 must be at least 1"),
        ("precision=amp_o2 precision.min_loss_scale=0", "precision.min_loss_scale=0 must be above 0"),
        ("precision=fp16 precision.min_loss_scale=1e6", "at most the initial scale, 2**16 = 65536"),
        ("precision=fp16 precision.scale_factor=1", "precision.scale_factor=1 must be above 1"),
        ("precision=bf16 precision.hysteresis=3", "precision.hysteresis=3 has no effect with precision=bf16"),
        ("precision=bf16 precision.loss_scale_rule=deepspeed", "precision.loss_scale_rule=deepspeed has no effect"),
        ("precision=fp32 precision.loss_scale=8", "precision.loss_scale=8 has no effect with precision=fp32"),
        (
            "precision=fp16 precision.loss_scale=8 precision.initial_scale_power=3",
            "precision.initial_scale_power=3 has no effect with precision.loss_scale=8",
        ),
        ("precision=fp32 precision.reduce=compute", "precision.reduce=compute has no effect with precision=fp32"),
    ],
)
def test_wrong_options_of_the_loss_scale_are_refused(tiny, options, words):
    with pytest.raises(ConfigError) as refused:
        load([*tiny, "run.dir=x", "run.name=x", *options.split()])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
