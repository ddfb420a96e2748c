"""Models that read samples: memory and collectives as real ranks have them, and plans with nothing written for them."""

from dataclasses import replace

import pytest
from marking import marked

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.satellites.plan.largest import largest_models
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.parameters import num_blocks, num_parameters
from gptlite.satellites.plan.planning import make_plan
from gptlite.satellites.plan.profile import profile_of
from gptlite.satellites.plan.report import report
from gptlite.satellites.plan.segments import MATMUL
from plan.test_memory import wrong_twice
from plan.truth import workload
from plan.truth_layouts import MODELS, Layout

QUICK = [
    Layout(1, "norm=batch", "resnet"),
    Layout(2, "norm=batch zero=3", "resnet"),
    Layout(2, "norm=group pp=2", "resnet"),
    Layout(2, "zero=3", "perceptron"),
]
SLOW = [
    *(Layout(2, f"norm=group {words}", "resnet") for words in ("zero=2", "zero=3", "pp=2 schedule=zero_bubble")),
    *(Layout(2, f"norm=batch {words}", "resnet") for words in ("zero=2", "pp=2", "pp=2 schedule=zbv")),
    Layout(2, "norm=batch zero=3 micro=2", "resnet"),
    Layout(2, "norm=batch zero=1 recompute=full", "resnet"),
    Layout(1, "norm=group", "resnet"),
    Layout(1, "norm=batch dtype=bf16", "resnet"),
    Layout(2, "norm=group zero=2 bucket=3", "resnet"),
    Layout(4, "norm=batch pp=2 zero=3", "resnet"),
    *(Layout(1, f"form={form}", "perceptron") for form in ("sequential", "listed", "whole")),
    *(Layout(2, f"form={form} zero={zero}", "perceptron") for form in ("listed", "whole") for zero in (2, 3)),
    Layout(2, "zero=2", "perceptron"),
    Layout(2, "pp=2", "perceptron"),
    *(Layout(2, words, "scaled") for words in ("zero=2", "zero=3")),
    Layout(1, "", "scaled"),
]


SETS = [QUICK, *([each] for each in SLOW)]


def name_of(layouts: list[Layout]) -> str:
    return f"{layouts[0].model} {layouts[0].name}" if len(layouts) == 1 else "quick"


@pytest.mark.parametrize("layouts", marked(SETS, quick=1, slow=len(SLOW), name=name_of))
def test_memory_and_collectives_are_those_of_real_ranks(layouts):
    assert wrong_twice(layouts) == []


def test_blocks_that_differ_are_counted_one_by_one():
    work = workload(Layout(1, "norm=batch", "resnet").config(), 1)
    assert num_blocks(work.model) == 10
    full = replace(work.model, width=64)
    assert num_parameters(full) == 11_181_642
    first = next(op for op in profile_of(work).blocks[0].ops if op.kind == MATMUL)
    # Filters of 3 x 7 x 7 for 16 channels, over 16 x 16 places of four images.
    assert (first.rows, first.inner, first.columns) == (4 * 16 * 16, 3 * 7 * 7, 16)
    assert first.flops == 2 * first.rows * first.inner * first.columns


def test_a_model_that_reads_samples_has_a_plan():
    Layout(1, "", "perceptron").config()  # registers the model
    config = load([*MODELS["perceptron"], "cluster=dgx-a100", "data.micro_batch_size=null", "data.global_batch_size=8"])
    config.run.overrides = ["cluster=dgx-a100"]
    made = make_plan(config, 2, lambda text: None)
    kinds = {(each.work.parallelism.pipeline, each.work.layout.data_size) for each in made.found.ranked}
    assert kinds == {(1, 2), (2, 1)}
    assert made.best.prediction.memory == most(made.best.work)[1]
    text = report(made, 10)
    assert "samples/s" in text
    assert "8 samples, fp32" in text
    assert "vocabulary" not in text


def test_a_module_without_blocks_is_not_cut_into_stages():
    Layout(1, "", "perceptron").config()
    config = load([*MODELS["perceptron"], "cluster=dgx-a100", "model.form=whole"])
    made = make_plan(config, 2, lambda text: None)
    assert {each.work.parallelism.pipeline for each in made.found.ranked} == {1}


def test_no_largest_model_of_blocks_that_differ():
    config = Layout(1, "", "perceptron").config()
    with pytest.raises(ConfigError, match="those of perceptron differ; give another model"):
        largest_models(config, lambda text: None)
