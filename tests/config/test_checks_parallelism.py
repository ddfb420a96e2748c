"""Layouts that cannot run are refused in one line before any rank starts; those that can are not."""

from dataclasses import replace
from itertools import product

import pytest

from gptlite.config import checks, load
from gptlite.config.batch import check_world
from gptlite.config.checks import check
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.config.schema import CONF_DIR
from gptlite.data.batches import batch_schedule
from gptlite.errors import ConfigError
from gptlite.parallelism.layout import SCHEDULES, Layout, largest_micro_batch, wanted_world

PRESETS = {
    "single": (1, 1, 1, 1),
    "ddp": (1, 2, 1, 1),
    "zero1": (1, 1, 2, 1),
    "zero2": (1, 1, 2, 1),
    "zero3": (1, 1, 2, 1),
    "tp2": (1, 1, 1, 2),
    "tp4": (1, 1, 1, 4),
    "tp8": (1, 1, 1, 8),
    "pp2": (2, 1, 1, 1),
    "pp4": (4, 1, 1, 1),
    "tp2_pp2": (2, 1, 1, 2),
    "tp2_pp2_dp2": (2, 2, 1, 2),
    "tp4_pp4": (4, 1, 1, 4),
    "zero3_cpu_offload": (1, 1, 2, 1),
    "zero_infinity": (1, 1, 2, 1),
    "cp2": (1, 2, 1, 1),
    "cp4": (1, 4, 1, 1),
    "tp2_cp2": (1, 2, 1, 2),
}
CONTEXT = {"cp2": 2, "cp4": 4, "tp2_cp2": 2}
NEEDS = {"zero_infinity": ["parallelism.offload_path=/nvme/run1"], "tp8": ["model=gpt-lite"]}
ZERO = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_cpu_offload": 3, "zero_infinity": 3}


@pytest.fixture(autouse=True)
def composed_by_hydra() -> None:
    """Not here: what is judged is our checks of what has been composed."""


def loaded(words):
    """The configuration of overrides; a key without a section is one of parallelism's."""
    given = [word if word.partition("=")[0].count(".") else f"parallelism.{word}" for word in words.split()]
    return load(["model=gpt-lite", *given])


def refusal(action):
    with pytest.raises(ConfigError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF_DIR / "parallelism").glob("*.yaml")))
def test_every_preset_runs_as_it_is_on_a_cpu(name):
    config = load([f"parallelism={name}", *NEEDS.get(name, [])])
    assert from_yaml(to_yaml(config)) == config
    if name == "auto":  # which has no degrees of its own: tests/plan/test_search.py
        return
    layout = Layout(PRESETS[name], (CONTEXT.get(name, 1),))
    assert check_world(config, wanted_world(config.parallelism, gpus=0)) == layout
    assert config.parallelism.zero == ZERO.get(name, 0)


def test_a_data_parallel_preset_takes_every_gpu():
    for name in ("ddp", "zero1", "zero2", "zero3"):
        config = load([f"parallelism={name}"])
        assert check_world(config, wanted_world(config.parallelism, gpus=8)).data_size == 8


def test_one_device_by_default_with_all_of_the_batch_at_once():
    config = load()
    assert wanted_world(config.parallelism, gpus=8) == 1
    assert check_world(config, 1) == Layout()
    micro = config.data.micro_batch_size or largest_micro_batch(config.parallelism, [config.data.global_batch_size], 1)
    assert micro == config.data.global_batch_size == 16


REFUSED = {
    # Degrees.
    "tensor=0": "parallelism.tensor=0 must be at least 1",
    "data=0": "parallelism.data=0 must be at least 1",
    "tensor=3": "model.num_heads=8 is not divisible by parallelism.tensor=3; try parallelism.tensor=1, 2, 4, 8",
    "tensor=16": "model.num_heads=8 is not divisible by parallelism.tensor=16; try parallelism.tensor=1, 2, 4, 8",
    "tensor=4 model.d_ff=1002": "model.d_ff=1002 is not divisible by parallelism.tensor=4; "
    "try parallelism.tensor=1, 2\n",
    "tensor=8 model.vocab_size=4 model.vocab_multiple=1": "parallelism.tensor=8 exceeds the 4 rows of the embedding",
    # Context parallelism.
    "context=0": "parallelism.context=0 must be at least 1",
    "context=4 data.sequence_length=252": "data.sequence_length=252 is not divisible by 2 x parallelism.context=4 = 8, "
    "the number of chunks that balances causal attention; try "
    "parallelism.context=1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63, 126, or "
    "data.sequence_length=248 or 256\n",
    "context=2 data.sequence_length=255": "data.sequence_length=255 is not divisible by 2 x parallelism.context=2 = 4, "
    "the number of chunks that balances causal attention; try "
    "parallelism.context=1, or data.sequence_length=252 or 256\n",
    "context=4 sequence=true tensor=8 data.sequence_length=240": "data.sequence_length=240 / parallelism.context=4 "
    "= 60 is not divisible by parallelism.tensor=8; try parallelism.tensor=1, 2, 4\n",
    # Sequence parallelism.
    "sequence=true": "parallelism.sequence=true splits sequences over tensor-parallel ranks, but parallelism.tensor=1; "
    "use parallelism.sequence=false, or parallelism.tensor=2, 4 or 8",
    "sequence=true tensor=4 data.sequence_length=250": "data.sequence_length=250 is not divisible by "
    "parallelism.tensor=4; try parallelism.tensor=1, 2\n",
    # Offload.
    "offload=nvme": "parallelism.offload=nvme needs a folder for its files; set it, e.g. "
    "parallelism.offload_path=/nvme/run1",
    "offload=cpu offload_path=/nvme": "parallelism.offload_path=/nvme is only for parallelism.offload=nvme, not cpu; "
    "leave it out, or use parallelism.offload=nvme",
    "offload_parameters=true": "parallelism.offload_parameters=true is only for parallelism.offload=nvme, not none; "
    "leave it out, or use parallelism.zero=3 parallelism.offload=nvme parallelism.offload_path=/nvme/run1",
    "offload=nvme offload_path=/nvme offload_parameters=true zero=2": "parallelism.offload_parameters=true gathers "
    "parameters block by block, which parallelism.zero=2 does not; use parallelism.zero=3",
    "offload=nvme offload_path=/nvme offload_parameters=true zero=3 data=4 dp_replicate=2": "parallelism."
    "offload_parameters=true with parallelism.dp_replicate=2 would sum gradients in memory; use "
    "parallelism.dp_replicate=1, which shards over all data ranks",
    "offload_buffer_mib=0": "parallelism.offload_buffer_mib=0 must be at least 1",
    # ZeRO and copies.
    "zero=4": "parallelism.zero=4 is not a ZeRO stage; use 0, 1, 2 or 3",
    "zero=-1": "parallelism.zero=-1 is not a ZeRO stage",
    "data=4 dp_replicate=3 zero=1": "parallelism.dp_replicate=3 does not divide the 4 data-parallel ranks; "
    "try parallelism.dp_replicate=1, 2, 4",
    "data=4 dp_replicate=2": "parallelism.dp_replicate=2 has no meaning with parallelism.zero=0, which",
    # Schedules and their stages.
    "schedule=1f1d": "parallelism.schedule=1f1d is not one of gpipe, 1f1b, interleaved_1f1b, zero_bubble, zbv; did you",
    "schedule=zbv pipeline=2 virtual_stages=1": "parallelism.virtual_stages=1: parallelism.schedule=zbv has 2 per rank",
    "pipeline=2 virtual_stages=2": "parallelism.virtual_stages=2: parallelism.schedule=1f1b has 1 per rank; use "
    "parallelism.virtual_stages=1, or parallelism.schedule=interleaved_1f1b or zero_bubble",
    "pipeline=2 schedule=gpipe virtual_stages=3": "parallelism.virtual_stages=3: parallelism.schedule=gpipe has 1",
    "pipeline=2 virtual_stages=0": "parallelism.virtual_stages=0 must be at least 1",
    "pipeline=5 data.micro_batch_size=1": "parallelism.pipeline=5 x 1 stages per rank = 5 stages, and every "
    "stage needs at least one block, but model.num_layers=4; try parallelism.pipeline=1, 2, 3, 4, or "
    "model.num_layers=5",
    "pipeline=4 schedule=zero_bubble": "parallelism.pipeline=4 x 2 stages per rank = 8 stages, and "
    "every stage needs at least one block, but model.num_layers=4; try parallelism.pipeline=1, 2, or "
    "parallelism.virtual_stages=1, or model.num_layers=8",
    "pipeline=4 schedule=zbv": "try parallelism.pipeline=1, 2, or parallelism.schedule=1f1b, or model.num_layers=8",
    "pipeline=2 schedule=zbv trainer.compile=true": "trainer.compile=true: the backward pass of a compiled block",
    # Batches.
    "data=2 data.micro_batch_size=16": "data.global_batch_size=16 = data.micro_batch_size=16 x accumulation x data=2 "
    "has no integer solution for accumulation; try data.micro_batch_size=1, 2, 4 or 8, or data.global_batch_size=32",
    "data=3 data.micro_batch_size=4": "x accumulation x data=3 has no integer solution for accumulation; "
    "try data.global_batch_size=12 or 24",
    "pipeline=2 data.micro_batch_size=16": "data.global_batch_size=16 = data.micro_batch_size=16 x accumulation=1 x "
    "data=1: parallelism.schedule=1f1b with parallelism.pipeline=2 needs at least 2 micro-batches per step, not 1; "
    "try data.micro_batch_size=1, 2, 4 or 8, or data.global_batch_size=32",
    "pipeline=4 data=2 data.micro_batch_size=4": "needs at least 4 micro-batches per step, not 2; "
    "try data.micro_batch_size=1 or 2, or data.global_batch_size=32",
    "pipeline=2 data=1 schedule=zero_bubble data.global_batch_size=14 data.micro_batch_size=2": "can run 6 or 8 "
    "micro-batches per step, in equal rounds of 2 or more, but not 7; try data.micro_batch_size=1, 7 or 14, or "
    "data.global_batch_size=12 or 16",
    "pipeline=2 data=1 schedule=interleaved_1f1b data.global_batch_size=14 data.micro_batch_size=2": "can run 6 or 8",
    # The rest.
    "bucket_layers=0": "parallelism.bucket_layers=0 must be at least 1",
    "prefetch=-1": "parallelism.prefetch=-1 must not be negative",
    "timeout_seconds=0": "parallelism.timeout_seconds=0.0 must be above 0 and at most 1,000,000",
    "timeout_seconds=nan": "parallelism.timeout_seconds=nan is not a number; give one",
    "timeout_seconds=inf": "parallelism.timeout_seconds=inf must be above 0",
    "trainer.max_restarts=-1": "trainer.max_restarts=-1 must not be negative; 0 turns it off",
    "trainer.replica_check_interval=-1": "trainer.replica_check_interval=-1 must not be negative; 0 turns it off",
    "activation_checkpointing=some": "parallelism.activation_checkpointing: Invalid value 'some'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_layout_is_one_line_that_names_key_value_and_fix(words):
    assert REFUSED[words] in refusal(lambda: loaded(words)) + "\n"


WORLDS = {
    ("tensor=2 pipeline=2", 6): "world size 6 = parallelism.pipeline=2 x data x parallelism.context=1 x "
    "parallelism.tensor=2 has no integer solution for data; try parallelism.tensor=1, 3, or parallelism.pipeline=1, 3, "
    "or 4 or 8 ranks",
    ("data=3 data.global_batch_size=15 data.micro_batch_size=5", 4): "world size 4 is not parallelism.pipeline=1 x "
    "parallelism.data=3 x parallelism.context=1 x parallelism.tensor=1 = 3; try parallelism.data=4, or 3 ranks",
    ("zero=1 data.micro_batch_size=4", 3): "data.global_batch_size=16 = data.micro_batch_size=4 x accumulation x "
    "data=3 has no integer solution for accumulation; try data.global_batch_size=12 or 24",
    ("pipeline=2 data.micro_batch_size=4", 8): "needs at least 2 micro-batches per step, not 1; "
    "try data.micro_batch_size=1 or 2, or data.global_batch_size=32",
    ("zero=3 dp_replicate=4", 2): "parallelism.dp_replicate=4 does not divide the 2 data-parallel ranks",
}


@pytest.mark.parametrize(("words", "world"), WORLDS)
def test_what_depends_on_the_world_is_refused_once_it_is_known(words, world):
    config = loaded(words)
    assert WORLDS[words, world] in refusal(lambda: check_world(config, world))


def test_a_micro_batch_left_open_is_refused_where_none_would_do():
    few = "data.global_batch_size=2 data.micro_batch_size=null pipeline=4"
    assert "=2 = data.micro_batch_size=1 x accumulation=2 x data=1: parallelism.schedule=1f1b" in refusal(
        lambda: loaded(few)
    )
    config = loaded("data.micro_batch_size=null")
    assert "data.global_batch_size=16 = data.micro_batch_size x accumulation x data=3 has no integer" in refusal(
        lambda: check_world(config, 3)
    )
    assert check_world(config, 4).data_size == 4
    assert from_yaml(to_yaml(config)).data.micro_batch_size is None


RAMPS = {
    "data.batch_ramp=[3,1,100] parallelism.data=2 data.micro_batch_size=1": "includes a global batch size "
    "of 3, which is not divisible by data.micro_batch_size=1 x data=2; "
    "use a first size and an increment that are multiples of 2",
    "data.batch_ramp=[1,5,100] parallelism.pipeline=2 parallelism.data=1 data.micro_batch_size=1": "includes a global "
    "batch size of 1: parallelism.schedule=1f1b with "
    "parallelism.pipeline=2 needs at least 2 micro-batches per step, not 1; use",
    "data.batch_ramp=[5,2,100]": "does not reach data.global_batch_size=16 from 5 in steps of 2; take an increment",
}


@pytest.mark.parametrize("given", RAMPS)
def test_a_ramp_that_the_layout_cannot_run_is_refused(given):
    assert RAMPS[given] in refusal(lambda: load(given.split()))


def test_a_micro_batch_left_open_suits_every_size_of_a_ramp():
    config = load(["data.batch_ramp=[4,4,100]", "parallelism.data=2", "data.micro_batch_size=null"])
    sizes = batch_schedule(16, config.data.batch_ramp).sizes()
    assert largest_micro_batch(config.parallelism, sizes, 2) == 2


@pytest.fixture(scope="module")
def deep():
    """A configuration of eight layers, to be changed without composing it again."""
    return load(["model=gpt-lite", "model.num_layers=8", "data.micro_batch_size=1", "data.global_batch_size=24"])


def check_changed(config, batch, micro, **layout):
    data = replace(config.data, global_batch_size=batch, micro_batch_size=micro)
    changed = replace(config, data=data, parallelism=replace(config.parallelism, **layout))
    check(changed)
    return changed


def test_every_choice_that_a_refused_batch_names_would_do(deep):
    tried = 0
    for schedule, pipeline, data, micro, batch in product(SCHEDULES, (1, 2, 4), (1, 2, 3), (1, 2, 3, None), (4, 7, 12)):
        layout = {"schedule": schedule, "pipeline": pipeline, "data": data}
        try:
            check_changed(deep, batch, micro, **layout)
        except ConfigError as error:
            for choice in str(error).split("; try ")[1].split(", or "):
                key, _, values = choice.partition("=")
                for value in map(int, values.replace(" or ", ", ").split(", ")):
                    sizes = (value, micro) if key == "data.global_batch_size" else (batch, value)
                    changed = {"data": value} if key == "parallelism.data" else {}
                    check_changed(deep, *((batch, micro) if changed else sizes), **layout | changed)
                    tried += 1
    assert tried > 300


def test_legal_layouts_are_accepted(deep):
    """The axes of the parity matrix on eight ranks. Every schedule runs 24, 12, 6 or 3 micro-batches where it fills."""
    count = 0
    for tensor, pipeline, zero, schedule in product((1, 2, 4, 8), (1, 2, 4), (0, 1, 2, 3), SCHEDULES):
        if tensor * pipeline <= 8:
            layout = {"tensor": tensor, "pipeline": pipeline, "zero": zero, "schedule": schedule}
            config = check_changed(deep, 24, 1, sequence=tensor > 1, **layout)
            assert check_world(config, 8).data_size == 8 // (tensor * pipeline)
            count += 1
    assert count == 9 * 4 * 5


@pytest.mark.parametrize(
    "words",
    [
        "zero=3 dp_replicate=2",  # the data degree is not known yet
        "dp_replicate=4",
        "data=4 dp_replicate=4 data.micro_batch_size=1",
        "pipeline=4 schedule=zero_bubble virtual_stages=1 data.micro_batch_size=1",
        "pipeline=2 schedule=zbv virtual_stages=2 data.micro_batch_size=8",
        "pipeline=2 schedule=interleaved_1f1b trainer.compile=true data.micro_batch_size=8",
        "pipeline=3 schedule=gpipe data.micro_batch_size=16",
        "schedule=zbv trainer.compile=true",  # no pipeline, nothing is split
        "virtual_stages=3 schedule=interleaved_1f1b",
        "tensor=8 model.vocab_size=65 model.vocab_multiple=1",
        "tensor=8 model.d_ff=1000",
        "prefetch=0 bucket_layers=100 timeout_seconds=0.5 trainer.max_restarts=3 trainer.replica_check_interval=10",
    ],
)
def test_unusual_layouts_are_accepted(words):
    loaded(words)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
@pytest.mark.parametrize(("torch", "splits"), [("2.11.0+cu130", False), ("2.12.0", True), ("2.13.0+cpu", True)])
def test_split_backward_passes_need_a_torch_that_computes_them_right(schedule, torch, splits, monkeypatch):
    monkeypatch.setattr(checks, "version", lambda name: torch)
    monkeypatch.setattr(checks, "torch_splits", checks.torch_splits.__wrapped__)
    words = f"pipeline=2 schedule={schedule} data.micro_batch_size=8"
    if splits:
        loaded(words)
    else:
        with pytest.raises(ConfigError, match=rf"^parallelism.schedule={schedule} needs torch 2.12 or newer"):
            loaded(words)
    loaded("pipeline=2 schedule=interleaved_1f1b data.micro_batch_size=8")
