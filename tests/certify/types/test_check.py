"""Types of whole training steps: what is right passes, on every kind of model and axis, and what is wrong is named."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed.cells import experts as moe
from distributed.cells.bugs import BUGS
from distributed.cells.layouts import Cell

from certify.types.faults import found_by_types, report_of
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.models import parallelize
from gptlite.models.gpt import mlp as gpt_mlp
from gptlite.parallelism import tensor
from gptlite.satellites.certify.types.check import check_types

MODERN = ("model.position=rope", "model.norm=rms_norm", "model.bias=false", "model.mlp=swiglu")
GROUPED = (*MODERN, "model.num_heads=16", "model.kv_heads=8", "model.head_dim=4")
RIGHT = {
    "dense": Cell(tensor=2, data=2, zero=2, accumulation=2),
    "sequence": Cell(tensor=2, data=2, zero=1, sequence=True, tied=False),
}
MORE = {
    "pipeline": Cell(tensor=2, pipeline=2, data=2, zero=1, schedule="1f1b", accumulation=4),
    "context": Cell(tensor=2, context=2, data=2, zero=3, vocabulary="uneven"),
    "copies": Cell(tensor=2, data=2, zero=0, accumulation=2),
    "hybrid": Cell(tensor=2, data=4, replicate=2, zero=2, accumulation=2),
    "modern": Cell(tensor=4, data=2, zero=3, sequence=True, shared=GROUPED),
    "values": Cell(tensor=2, pipeline=2, schedule="1f1b", accumulation=4, shared=("model.value_residual=true",)),
    "zero bubble": Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="zero_bubble", accumulation=4, tied=False),
    "zbv": Cell(pipeline=2, data=2, schedule="zbv", accumulation=4, checkpointing="selective"),
    "recomputed": Cell(tensor=2, data=2, zero=3, sequence=True, checkpointing="full"),
    "offloaded": Cell(tensor=2, data=2, zero=2, offload="cpu"),
    "half": Cell(tensor=2, data=2, zero=2, precision="fp16"),
    "experts": Cell(tensor=2, data=4, zero=2, shared=moe.BIAS, more=("parallelism.expert=2",)),
    "experts of copies": Cell(data=2, context=2, accumulation=2, shared=moe.LOSSES, more=("parallelism.expert=2",)),
    "experts in slices": Cell(tensor=2, data=2, zero=3, sequence=True, shared=moe.SIGMOID),
    "muon": Cell(tensor=2, data=2, zero=2, more=("optimizer=muon",)),
}


def passes(cell: Cell) -> None:
    report = report_of((), cell)
    assert report.passed, report.message
    assert report.collectives > 0
    assert not report.message


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_layout_passes(name):
    passes(RIGHT[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_a_right_layout_of_another_kind_passes(name):
    passes(MORE[name])


# Those of BUGS in which values are the same or partial sums where they must not be; types do not see other values.
SEEN = [
    "tensor: a row-parallel layer's outputs are not summed",
    "tensor: a column-parallel layer's input gradients are not summed",
    "tensor: what every rank holds counts on each in the norm",
    "sequence: gradients of norms and biases stay those of a slice",
    "sequence: gradients of norms and biases are summed twice",
    "pipeline: the tied embedding's gradients are not added across the ends",
    "pipeline: the tied embedding counts on both ends in the norm",
    "context: gradients of keys and values are those of a rank's own queries",
    "context: gradients are not summed over its ranks",
    "context: gradients are not reduced to the shards of its ranks",
    "expert: gradients of tokens are multiplied by the degree",
    "expert: the norm misses the experts",
    "expert: the router's gradient is that of a rank's hidden units",
    "expert: loads are those of one rank",
    "data: the valid tokens are those of one rank",
    "data: gradients are averaged over ranks",
    "zero: gradients are not reduced",
    "zero: copies of the shards do not sum their gradients",
    "zero: each rank clips by the norm of its own shards",
]
QUICK = {"zero: each rank clips by the norm of its own shards"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in SEEN])
def test_a_bug_of_collectives_is_found(name):
    assert found_by_types(BUGS[name].patches, BUGS[name].cell)


def test_a_check_leaves_process_groups_as_they_were():
    before = dict(vars(dist.ProcessGroup))
    assert report_of((), Cell(tensor=2)).passed
    assert all(value is before[name] for name, value in vars(dist.ProcessGroup).items())


def _another_axis(x: torch.Tensor, axis: tensor.TensorAxis) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def test_the_message_names_the_layer_the_axis_and_both_types():
    cell = Cell(tensor=2, data=2, zero=2)
    forgotten = report_of(((gpt_mlp.MLP, "forward", _without_sum(gpt_mlp.MLP.forward)),), cell).message
    assert forgotten == "layers.0.mlp.down: RowParallelLinear: over tp, P -> I needs all_reduce, found none"
    wide = report_of(((tensor, "_sum", _another_axis),), cell).message
    assert wide.startswith(
        "token_embedding: _Sum.forward: over tp, P -> I needs all_reduce, found all_reduce over the w"
    )


def _without_sum(forward):
    def run(self, *args, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor, "leave", lambda x, axis: x)
            return forward(self, *args, **options)

    return run


def test_two_sums_are_named():
    def twice(parameters, axis):
        parameters = list(parameters)
        for _ in range(2):
            tensor.sum_sliced_gradients(parameters, axis)

    report = report_of(((parallelize, "sum_sliced_gradients", twice),), Cell(tensor=2, data=2, sequence=True))
    assert not report.passed
    assert "adds up a value that is the same on all ranks of tp" in report.message
    assert "2 times" in report.message


LARGE = """
data=synthetic data.vocab_size=512 data.num_tokens=200000000 data.global_batch_size=1024 data.micro_batch_size=1
data.sequence_length=64 model=gpt-lite model.num_layers=96 model.num_heads=8 model.d_model=64 run.dir=unused
parallelism.tensor=8 parallelism.pipeline=4 parallelism.schedule=1f1b parallelism.zero=2
""".split()


@pytest.mark.slow
def test_4096_ranks_take_less_than_20_seconds():
    command = "import sys, time\nfrom gptlite.config import load\n"
    command += "from gptlite.satellites.certify.types.check import check_types\n"
    command += "report = check_types(load(sys.argv[1:]), 4096)\nprint(report.passed, time.process_time())"
    done = subprocess.run([sys.executable, "-c", command, *LARGE], capture_output=True, text=True, check=True)
    passed, seconds = done.stdout.split()
    assert passed == "True"
    assert float(seconds) < 20


def test_a_single_rank_has_no_collectives():
    report = check_types(load(Cell().overrides()), 1)
    assert report.passed
    assert report.collectives == 0


def test_axes_without_common_factors_are_refused():
    cell = Cell(data=3, context=2, shared=moe.SIZES, more=("parallelism.expert=3",))
    with pytest.raises(ConfigError, match=r"parallelism.context=2 and parallelism.expert=3"):
        report_of((), replace(cell, shared=(*moe.SIZES[1:], "model.moe.experts=6")))
