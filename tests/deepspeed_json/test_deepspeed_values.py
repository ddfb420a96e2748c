"""Values of DeepSpeed 0.19.8, measured by running it on a CPU (its FusedAdam, torch 2.13) with the JSONs below."""

from typing import Any

import pytest

from gptlite import load
from gptlite.config.schema import Config
from gptlite.optimizer.schedule import Schedule
from gptlite.satellites.deepspeed.expand import overrides_of
from gptlite.satellites.deepspeed.rows import Verdict
from gptlite.satellites.deepspeed.translate import translate


def composed(content: dict[str, Any]) -> Config:
    return load(overrides_of(translate(content)))


def refused(content: dict[str, Any]) -> list[str]:
    return [row.key for row in translate(content) if row.verdict is Verdict.refused]


def said(content: dict[str, Any], key: str) -> str:
    """The reason of the last row of a key."""
    return [row.reason for row in translate(content) if row.key == key][-1]


def rates(kind: str, updates: int, **params: Any) -> list[float]:
    """Return the learning rates of the first updates."""
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    config = composed({"optimizer": adam, "scheduler": {"type": kind, "params": params}})
    schedule = Schedule(config.schedule, config.trainer.max_steps)
    return [config.optimizer.lr * schedule.factor(update) for update in range(updates)]


# `engine.get_lr()` before each update. The first one precedes the scheduler's first step. The cosine ignores its
# warmup_min_ratio there, and its decay begins a step early, so that it does not reach the peak.
def test_learning_rates_are_those_of_deepspeeds_updates():
    cosine = {"total_num_steps": 8, "warmup_min_ratio": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    expected = [0, 0.005, 0.00625, 0.0075, 0.00875, 0.00868198, 0.0055, 0.00231802, 0.001]
    assert rates("WarmupCosineLR", 9, cos_min_ratio=0.1, **cosine) == pytest.approx(expected, rel=1e-6)

    log = {"warmup_min_lr": 0.002, "warmup_max_lr": 0.01, "warmup_num_steps": 4}
    expected = [0.002, 0.002, 0.006, 0.00833985, 0.01, 0.01, 0.008, 0.006, 0.004, 0.002, 0.002]
    assert rates("WarmupDecayLR", 11, total_num_steps=8, **log) == pytest.approx(expected, rel=1e-6)

    line = {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}
    assert rates("WarmupLR", 5, **line) == pytest.approx([0, 0, 0.001, 0.002, 0.003])
    assert rates("WarmupLR", 5, last_batch_iteration=-1, **line) == rates("WarmupLR", 5, **line)


def test_schedules_that_deepspeed_begins_otherwise_are_refused():
    # From 0 on, the first update is at the optimizer's lr: losses differ by 2.4e-2 with 0, and by 6.9e-2 with 4.
    for begin in (-2, 0, 4):
        content = {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": begin}}}
        assert refused(content) == ["scheduler.params.last_batch_iteration"]
    # WarmupLR(optimizer, warmup_num_steps=0) raises ValueError.
    assert refused({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}) == [
        "scheduler.params.warmup_num_steps"
    ]


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        ("AdamW", {"torch_adam": True}, 0.01),  # torch.optim.AdamW's; with 0, losses differ by 3.6e-2
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),  # torch.optim.Adam's
        ("AdamW", {"torch_adam": False}, 0.0),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.3}, 0.3),
        ("AdamW", {"torch_adam": True, "weight_decay": None}, 0.01),
        ("AdamW", {}, 0.0),
    ],
)
def test_the_weight_decay_that_a_file_leaves_out_is_its_optimizers(kind: str, params: dict[str, Any], decay: float):
    assert composed({"optimizer": {"type": kind, "params": params}}).optimizer.weight_decay == decay


def test_rows_name_what_deepspeed_does_otherwise():
    given = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}
    assert said(given, "optimizer.params.weight_decay") == "matrices only"
    assert "DeepSpeed skips the step" in said(given, "bf16.enabled")


@pytest.mark.parametrize("given", [{}, {"gradient_clipping": None}])
def test_without_gradient_clipping_the_norm_is_1_and_a_row_says_so(given: dict[str, Any]):
    # `engine.gradient_clipping()` without the key is 1.0 since DeepSpeed's pull request 8068.
    (row,) = [row for row in translate(given) if row.overrides == ("optimizer.clip_norm=1.0",)]
    assert (row.key, "default" in row.reason) == ("gradient_clipping", True)


@pytest.mark.parametrize(
    ("given", "norm"),
    [
        ({"gradient_clipping": 0}, 0.0),
        ({"gradient_clipping": 0.5}, 0.5),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.3}}}, 0.3),
    ],
)
def test_a_given_norm_has_no_second_row(given: dict[str, Any], norm: float):
    assert sum("clip_norm" in each for row in translate(given) for each in row.overrides) == 1
    assert composed(given).optimizer.clip_norm == norm


def test_a_null_is_an_absent_key():
    for key, value in {"betas": 0.9, "eps": 1e-8, "lr": 1e-3}.items():
        config = composed({"optimizer": {"type": "AdamW", "params": {key: None}}})
        assert getattr(config.optimizer, {"betas": "beta1"}.get(key, key)) == value
    config = composed({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": None}}})
    assert config.schedule.warmup_steps == 1000


def test_fp16_sets_the_rule_of_the_loss_scale_and_other_precisions_do_not():
    rule = "precision.loss_scale_rule=deepspeed"
    for fp16 in ({"enabled": True}, {"enabled": True, "loss_scale": 128}):
        assert rule in overrides_of(translate({"fp16": fp16}))
        assert composed({"fp16": fp16}).precision.loss_scale_rule.name == "deepspeed"
    for content in ({"fp16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}, {}):
        assert rule not in overrides_of(translate(content))
    assert load(["precision=fp16"]).precision.loss_scale_rule.name == "megatron"
    # With a fixed scale, DeepSpeed skipped each of 6 updates that overflowed, and went on.
    assert "DeepSpeed skips every overflow" in said({"fp16": {"enabled": True, "loss_scale": 8}}, "fp16.loss_scale")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_row_names_the_fault_of_deepspeed_without_zero(precision: str):
    on = {precision: {"enabled": True}}
    assert "at stage 0, DeepSpeed" in said(on, "zero_optimization")
    assert "at stage 0, DeepSpeed" in said(on | {"zero_optimization": {"stage": 0}}, "zero_optimization.stage")
    assert said(on | {"zero_optimization": {"stage": 1}}, "zero_optimization.stage") == ""
    assert not any(row.key.startswith("zero") for row in translate({"bf16": {"enabled": False}}))


def test_muon_leaves_deepspeeds_names_to_adamw_and_names_the_difference_in_clipping():
    muon = {"optimizer": {"type": "Muon"}}
    assert composed(muon).optimizer.adamw_names == ["embed", "lm_head"]
    for stage, clips in ((0, False), (1, True), (2, True), (3, False)):
        content = muon | {"zero_optimization": {"stage": stage}}
        assert ("stages 1 and 2 clip" in said(content, "optimizer.type")) is clips
        assert said(content | {"gradient_clipping": 0}, "optimizer.type") == ""


def test_keys_of_this_version_are_known():
    content: dict[str, Any] = {
        "disable_python_gc": True,
        "data_types": {"keep_in_fp32_modules": ["norm"]},
        "zero_optimization": {
            "stage": 1,
            "compute_grad_norm": False,
            "parameter_alignment": True,
            "leaf_module": {"classes": ["Block"]},
        },
        "optimizer": {
            "type": "Muon",
            "params": {"adam_w_mode": True, "per_head_muon": False, "torch_adam": True, "foreach": True},
        },
    }
    assert refused(content) == []
    for key, value in (("adam_w_mode", False), ("per_head_muon", True)):
        other = {"optimizer": {"type": "Muon", "params": {key: value}}}
        assert refused(other) == [f"optimizer.params.{key}"]
