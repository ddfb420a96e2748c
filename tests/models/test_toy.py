"""The engine trains a model that it knows through its spec alone, and refuses by name what the spec does not have."""

import re
import shutil

import pytest
import torch
from distributed.cells.run import Ranks
from marking import marked
from models.toy import ConvConfig, config_of, train
from run_files import read_metrics

from gptlite.checkpoint.load import load_tensors
from gptlite.errors import ConfigError
from gptlite.launch.room import check_disk
from gptlite.models.model import Model
from gptlite.ops.inputs import Inputs
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.plan.advice import advice_lines
from gptlite.satellites.plan.planning import vocabulary_of, with_planned_vocabulary
from gptlite.satellites.sweep.job import predicted
from gptlite.trainer.build import build_run
from gptlite.trainer.state import model_tensors

LAYOUTS = {
    "zero1": ("parallelism.zero=1",),
    "zero3": ("parallelism.zero=3", "parallelism.activation_checkpointing=full"),
    "pp2": ("parallelism.pipeline=2", "parallelism.schedule=1f1b"),
}


def losses(folder) -> list[float]:
    return [row[key] for row in read_metrics(folder) for key in ("loss", "val_loss") if key in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert train(str(folder)) == 0
    return folder


def test_it_learns(tmp_path):
    (tmp_path / "text").write_text("the next of three is known from two before. " * 200)
    data = "data=text", f"data.path={tmp_path / 'text'}", "data.tokenizer=char", f"data.cache_dir={tmp_path / 'cache'}"
    steps = ("trainer.max_steps=30", "trainer.eval_interval=30")
    assert train(str(tmp_path / "run"), *data, *steps) == 0
    found = losses(tmp_path / "run")
    assert found[-1] < 0.2 < 2 < found[0]


def test_its_stages_have_equal_blocks():
    """Without a formula for its FLOPs: the last stage has no head that would count as a block."""
    assert Model.of(config_of("model.depth=5").model).stage_blocks(2) == [range(2), range(2, 5)]


def test_the_banner_says_what_is_known_of_it(alone):
    log = (alone / "train.log").read_text()
    assert "conv: 8.24k parameters" in log
    assert "FLOP n/a" in " ".join(log.split())
    assert "resume: " in log
    assert "generate: " not in log  # a command that would be refused
    assert {row["mfu"] for row in read_metrics(alone) if "mfu" in row} == {None}


@pytest.mark.parametrize("name", marked(list(LAYOUTS), quick=2, slow=len(LAYOUTS) - 2))
def test_every_layout_trains_alike_and_goes_on_where_another_stopped(alone, two, tmp_path, name):
    assert two.run("models.toy:train", str(tmp_path / "whole"), *LAYOUTS[name]) == [0, 0]
    assert losses(tmp_path / "whole") == pytest.approx(losses(alone), rel=2e-5)
    # One process goes on with what two ranks have saved halfway.
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000006")
    assert train(str(tmp_path / "half"), "parallelism=single") == 0
    assert "step-00000003" in (tmp_path / "half" / "train.log").read_text().split("resuming from")[1]
    assert losses(tmp_path / "half")[-1] == pytest.approx(losses(alone)[-1], rel=2e-5)


def test_a_checkpoint_holds_its_buffers_but_those_that_are_not_kept(alone, tmp_path):
    run = build_run(config_of(f"run.dir={tmp_path}"), build_mesh(ParallelismConfig()), lambda _: None)
    tensors = model_tensors(run.state.model, run.state.parts)
    assert "model.mean" in tensors
    assert "model.stack.c0.gain" in tensors
    assert "model.scratch" not in tensors
    assert torch.equal(tensors["model.mean"], torch.linspace(-0.1, 0.1, 24))
    assert run.state.parts[0].scratch.tolist() == [1, 1]  # type: ignore[union-attr]
    tensors["model.mean"].zero_()
    load_tensors(sorted((alone / "checkpoints").glob("step-*"))[-1], tensors, strict=False)
    assert torch.equal(run.state.parts[0].mean, torch.linspace(-0.1, 0.1, 24))  # type: ignore[arg-type]


def test_products_run_in_bf16_under_autocast(tmp_path):
    config = config_of("precision=bf16", f"run.dir={tmp_path}")
    run = build_run(config, build_mesh(ParallelismConfig()), lambda _: None)
    assert run.state.model.autocast is torch.bfloat16
    seen = []
    run.state.parts[0].stack["c0"].filter.register_forward_hook(lambda *given: seen.append(given[2].dtype))  # type: ignore
    assert train(str(tmp_path / "run"), "precision=bf16", "trainer.max_steps=2") == 0
    batch = run.state.loader.batch(0, 0)
    run.state.model.forward(run.state.parts[0], batch.tokens, Inputs(batch.targets))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("parallelism.tensor=2", "parallelism.tensor=2: the conv model has no sharding plan"),
        ("parallelism.context=2", "parallelism.context=2: the conv model does not support attention"),
        (
            "parallelism.pipeline=4",
            "4 stages, and every stage needs at least one block, but model.depth=3; try parallelism.pipeline=1, 2, 3",
        ),
        ("precision=fp8", "precision=fp8: the conv model has no GEMMs that run in fp8"),
        ("model.depth=0", "model.depth=0 must be at least 1"),
        ("model.d_model=4", "model.d_model is not a key"),
    ],
)
def test_what_the_spec_does_not_have_is_refused_by_name(words, refusal):
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        config_of(words)


def test_a_configuration_without_a_spec_is_named():
    with pytest.raises(TypeError, match="dict is not the configuration of a registered model"):
        Model.of({})
    assert Model.of(ConvConfig(symbols=3)).spec.name == "conv"


def test_it_is_planned_with_nothing_written_for_it(tmp_path):
    config = config_of(f"run.dir={tmp_path}")
    sized, _ = with_planned_vocabulary(config)
    assert vocabulary_of(sized.model) == 61
    found = predicted(config, Layout())
    assert found is not None
    assert found["step_seconds"] > 0
    assert found["memory"]["activations"] > 0
    assert any("data.micro_batch_size" in line for line in advice_lines(config, 1))


def test_moments_in_files_change_nothing(alone, tmp_path):
    words = ("parallelism.offload=nvme", f"parallelism.offload_path={tmp_path}")
    check_disk(config_of(*words), Layout(), 1)
    with Ranks(1) as ranks:  # a rank that offloads joins a process group
        assert ranks.run("models.toy:train", str(tmp_path / "run"), *words) == [0]
    assert losses(tmp_path / "run") == losses(alone)
