"""`gptlite.initialize`: a loop of one's own equals torch's, on every layout, and resumes what another layout saved."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from distributed.cells.run import Ranks
from engine.loops import FP32, HELD_OUT, Net, checkpoints, global_batch, stages, train
from torch import nn

import gptlite
from gptlite import ConfigError, initialize

ROOT = Path(__file__).parents[2]
LAST = 6
DATA = {f"zero{stage}": (f"parallelism.zero={stage}",) for stage in range(4)} | {
    "zero3 recomputed": ("parallelism=zero3", "parallelism.activation_checkpointing=full"),
    "zero2 offloaded": ("parallelism=zero2", "parallelism.offload=cpu"),
}
STAGES = {
    "gpipe": ("parallelism.pipeline=2", "parallelism.schedule=gpipe", "data.micro_batch_size=2"),
    "1f1b": ("parallelism.pipeline=2", "parallelism.schedule=1f1b", "data.micro_batch_size=4"),
    "zero bubble": ("parallelism.pipeline=2", "parallelism.schedule=zero_bubble", "data.micro_batch_size=2"),
}
SLOW = dict.fromkeys(
    ("zero0", "zero1", "zero3 recomputed", "1f1b", "gpipe"), pytest.mark.slow
)  # of which others take every step


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone():
    """What one process finds, by module."""
    return {name: train(name, LAST) for name in ("net", "stages")}


def near(found: dict, expected: dict, tolerance: float = 2e-5) -> None:
    for key in ("curve", "evaluation"):
        assert found[key] == pytest.approx(expected[key][-len(found[key]) :], rel=tolerance)


def hand_written(module: nn.Module, steps: int) -> tuple[list[float], float]:
    """Losses and gradient norms of a plain loop with torch's AdamW, and the accuracy on the held-out batches."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for step in range(steps):
        x, y = global_batch(step)
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    x, y = (torch.cat(each) for each in zip(*map(global_batch, HELD_OUT), strict=True))
    correct = module.eval()(x).argmax(-1) == y
    return found, correct.sum().item() / (y != -100).sum().item()


@pytest.mark.parametrize(("name", "module"), [("net", Net), ("stages", stages)])
def test_one_process_equals_a_plain_loop(alone, name, module):
    torch.manual_seed(0)
    curve, accuracy = hand_written(module(), LAST)
    assert alone[name]["curve"] == pytest.approx(curve, rel=1e-6)
    assert alone[name]["evaluation"][1] == pytest.approx(accuracy)
    assert len(set(alone[name]["curve"])) > LAST  # it trains
    assert alone[name]["samples"] == [8] * LAST


@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW.get(each, ())) for each in DATA])
def test_two_data_ranks_equal_one_process(two, alone, name):
    for found in two.run("engine.loops:train", "net", LAST, *DATA[name], timeout=300):
        near(found, alone["net"])
        assert found["samples"] == [8] * LAST


@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW.get(each, ())) for each in STAGES])
def test_a_pipeline_equals_one_process(two, alone, name):
    for found in two.run("engine.loops:train", "stages", LAST, *STAGES[name], timeout=300):
        near(found, alone["stages"])
        assert found["samples"] == [8] * LAST


def test_one_process_goes_on_with_what_two_ranks_have_saved(two, alone, tmp_path):
    saved = {"save": str(tmp_path)}
    schedule = ("schedule=cosine", "trainer.max_steps=10")
    whole = train("net", LAST, *schedule)
    two.run("engine.loops:train_with", saved, "net", 3, "parallelism=zero3", *schedule, timeout=300)
    assert checkpoints(tmp_path) == ["step-00000003"]
    resumed = train("net", LAST, *schedule, load=str(tmp_path))
    assert resumed["extra"] == {"last": 3}
    assert len(resumed["curve"]) == 2 * (LAST - 3)
    near(resumed, whole)
    saved, zero1 = {"load": str(tmp_path)}, "parallelism=zero1"
    others = two.run("engine.loops:train_with", saved, "net", LAST, zero1, *schedule, timeout=300)
    near(others[0], whole)


@pytest.mark.parametrize("precision", [("precision=bf16",), ("precision=fp16", "precision.loss_scale_window=2")])
def test_half_precision_resumes_with_its_loss_scale(tmp_path, precision):
    whole = train("stages", LAST, *precision)
    train("stages", 3, *precision, save=str(tmp_path))
    resumed = train("stages", LAST, *precision, load=str(tmp_path))
    assert resumed["curve"] == whole["curve"][6:]
    assert resumed["scales"] == whole["scales"][3:]
    assert len(set(whole["scales"])) == (1 if whole["scales"][0] is None else 3)


def test_accumulation_equals_one_batch(alone):
    torch.manual_seed(0)
    with initialize(stages(), config=FP32) as engine:
        curve = []
        for step in range(LAST):
            x, y = global_batch(step)
            parts = [{"input": x[part], "label": y[part]} for part in (slice(3), slice(3, None))]
            found = engine.step(parts)
            curve += [found.loss, found.grad_norm]
    assert curve == pytest.approx(alone["stages"]["curve"], rel=2e-5)


def test_a_loss_of_ones_own_is_a_mean_over_all_targets():
    torch.manual_seed(0)
    module = nn.Linear(CLASSES := 5, 3)
    expected = nn.Linear(CLASSES, 3)
    expected.load_state_dict(module.state_dict())
    x, y = torch.randn(7, CLASSES), torch.randn(7, 3)
    with initialize(module.eval(), config=[*FP32, "data.micro_batch_size=3"], loss=F.mse_loss) as engine:
        assert engine.module.training
        assert engine.step((x, y)).loss == pytest.approx(F.mse_loss(expected(x), y).item(), rel=1e-6)
        assert engine.evaluate([(x, y)]).loss == pytest.approx(F.mse_loss(engine(x), y).item(), rel=1e-6)
        assert not engine.module.get_parameter("weight").equal(module.weight)
        assert module.weight.equal(expected.weight)  # the given module keeps its values
    with (
        initialize(module, loss=lambda out, target: out - target) as engine,
        pytest.raises(TypeError, match="returned shape \\[7, 3\\]; return a scalar tensor"),
    ):
        engine.step((x, y))


def test_the_learning_rate_follows_the_schedule():
    x, y = global_batch(0)
    with initialize(stages(), config=["schedule=linear", "schedule.warmup_steps=0", "trainer.max_steps=4"]) as engine:
        rates = [engine.lr, *(engine.step((x, y)).lr for _ in range(2))]
        assert rates == pytest.approx([1e-3, 1e-3, 0.75e-3])
        assert engine.step_number == 2


def test_a_deepspeed_json_sets_optimizer_schedule_and_micro_batches(tmp_path):
    path = tmp_path / "ds_config.json"
    optimizer = {"type": "Lion", "params": {"lr": 0.002}}
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8, "optimizer": optimizer}))
    with initialize(stages(), config=[f"deepspeed={path}"]) as engine:
        assert engine.step(global_batch(0)).lr == 0.002
        assert type(engine.config.optimizer).__name__ == "LionConfig"
        assert engine.config.data.micro_batch_size == 4


def test_a_loss_that_is_not_finite_changes_nothing():
    module = stages()
    with initialize(module, config=FP32) as engine:
        x, y = global_batch(0)
        with pytest.raises(RuntimeError, match="step 1: loss nan"):
            engine.step((x * torch.nan, y))
        assert engine.module.get_parameter("0.weight").equal(module.get_parameter("0.weight"))
        assert engine.step_number == 0


def test_nothing_is_left_of_an_engine(tmp_path):
    before, threads = dict(os.environ), torch.get_num_threads()
    with initialize(stages(), config=["parallelism=zero2", "parallelism.offload=cpu"]) as engine:
        engine.step(global_batch(0))
        engine.save(tmp_path)
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "gpt-lite"}, "model='gpt-lite' is str; give an nn.Module"),
        ({"optimizer": "adamv"}, "optimizer=adamv does not exist"),
        ({"optimizer": torch.optim.AdamW}, "give a preset's name (adamw)"),
        ({"config": "parallelism=zero2"}, "config='parallelism=zero2' is not a list of strings"),
        ({"config": [3]}, "config=[3] is not a list of strings"),
        ({"config": ["parallelism.zer=2"]}, "parallelism.zer is not a key; did you mean parallelism.zero?"),
        ({"config": ["model=gpt-lite"]}, "model has no effect outside gptlite's own training loop"),
        ({"config": ["trainer.eval_interval=3"]}, "trainer.eval_interval has no effect"),
        ({"config": ["parallelism.data=2"]}, "parallelism.data=2"),
        ({"config": ["parallelism.tensor=2"]}, "parallelism.tensor=2: the module model has no sharding plan"),
        ({"config": ["parallelism=auto"]}, "parallelism=auto: the planner needs a model that reads tokens"),
        ({"config": ["precision=fp8"]}, "precision=fp8"),
        ({"model": nn.Linear(2, 2, device="meta")}, "weight has no values"),
        ({"model": nn.LazyLinear(2)}, "weight has no values"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        initialize(**{"model": stages(), **arguments})
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.ones(2, 5), "batch: a sample is Tensor"),
        ({"x": torch.ones(2, 5)}, "batch: a sample has the keys x, but none of labels"),
        ((torch.ones(2, 5), torch.ones(3, dtype=torch.int64)), "batch: the first dims of the tensors are 2, 3; all"),
        ((torch.ones(2, 5), torch.tensor(1)), "batch: the first dims of the tensors are 0, 2; all"),
        ([], "batch: the list is empty"),
    ],
)
def test_a_wrong_batch_is_one_line(batch, words):
    with initialize(stages(), config=FP32) as engine:
        with pytest.raises(ConfigError, match=re.escape(words)):
            engine.step(batch)
        with pytest.raises(ConfigError, match="nothing to evaluate"):
            engine.evaluate([])


def test_a_wrong_folder_is_one_line(tmp_path):
    with initialize(stages(), config=FP32) as engine:
        with pytest.raises(ConfigError, match=r"folder=.*nowhere does not exist"):
            engine.load(tmp_path / "nowhere")
        engine.step(global_batch(0))
        engine.save(tmp_path)
        with pytest.raises(TypeError, match="JSON"):
            engine.save(tmp_path / "other", extra={"tensor": torch.ones(1)})
    with initialize(Net(), config=FP32) as engine:
        with pytest.raises(ConfigError, match="does not match this run"):
            engine.load(tmp_path)
        with pytest.raises(ConfigError, match="already holds step-00000001"):
            engine.save(tmp_path)
    assert checkpoints(tmp_path) == ["step-00000001"]


def test_ranks_that_differ_are_one_line(two):
    assert two.run("engine.loops:uneven", "evaluation", timeout=300) == ["23", "23"]
    for rank, error in enumerate(two.run("engine.loops:uneven", "micro-batches", timeout=300)):
        assert error.startswith(f"batch: rank {rank} has {rank + 1} micro-batch")
    assert all(
        "rank 1's module differ from rank 0's" in error for error in two.run("engine.loops:other_module", timeout=300)
    )
    assert all(
        "one parameter under two names, 0.weight and 1.weight" in error
        for error in two.run("engine.loops:tied", timeout=300)
    )


def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "python.md").read_text()
    code = text.partition("## A loop of your own")[2].partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})
    assert checkpoints(tmp_path / "outputs" / "mine")
    with Ranks(2, join=False) as ranks:
        found = ranks.run("engine.loops:joins", code, str(tmp_path), timeout=300)
    assert found[0] == found[1]
    assert found[0][1:] == (False, True)


def test_gptlite_names_them_lazily():
    assert {"Engine", "initialize"} <= set(gptlite.__all__)
