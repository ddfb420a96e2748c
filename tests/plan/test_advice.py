"""What is said where memory ran out: three ways to take less, each legal and within the limit by the plan."""

from dataclasses import replace

import pytest
import torch
from token_folders import write_folder

from gptlite.config import Config, load
from gptlite.config.batch import check_world
from gptlite.precision import Policy
from gptlite.satellites.plan import advice
from gptlite.satellites.plan.advice import advice_lines, memory_advice
from gptlite.satellites.plan.local import assumed
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.planning import running, workload_of
from gptlite.satellites.plan.workload import RankBytes

RUN = (
    "model=gpt-lite",
    "data=synthetic",
    "model.vocab_size=512",
    "model.sequence_length=512",
    "precision=fp32",
    "data.global_batch_size=64",
    "data.micro_batch_size=32",
)


def taken(config: Config, world: int) -> int:
    work = workload_of(config, check_world(config, world), assumed())
    return most(replace(work, dtype="fp32"))[1].total


def suggested(lines: list[str]) -> list[list[str]]:
    """The overrides of each way."""
    (line,) = [line for line in lines if line.startswith("overrides that are predicted to fit: ")]
    ways = line.removeprefix("overrides that are predicted to fit: ").split("; ")
    return [way[: way.index(" (")].split() for way in ways]


@pytest.mark.parametrize(("extra", "world", "share"), [((), 1, 0.8), (("parallelism=ddp",), 2, 0.7)])
def test_three_ways_that_fit_the_mildest_first(monkeypatch, extra, world, share) -> None:
    whole = taken(load([*RUN, *extra]), world)
    room = share * whole
    limit = f"trainer.host_memory_limit={room / 2**30 + assumed().reserved_gib}"
    if assumed().device != "cpu":
        monkeypatch.setattr("gptlite.satellites.plan.advice.assumed", lambda: replace(assumed(), device="cpu"))
    lines = memory_advice(load([*RUN, *extra, limit]), world)
    assert lines[0].startswith("predicted memory of pipeline rank 0: ")
    ways = suggested(lines)
    assert len(ways) == 3
    assert ways[:2] == [["data.micro_batch_size=16"], ["parallelism.activation_checkpointing=full"]]
    assert len(ways[2]) == 1  # not both of them together, where either would do
    assert all(taken(load([*RUN, *extra, *way]), world) <= room for way in ways)


def test_no_way_has_an_override_that_is_not_needed() -> None:
    config = load([*RUN, "parallelism=ddp", "trainer.host_memory_limit=0.7"])
    room = 0.2 * 2**30
    for way in suggested(memory_advice(config, 2)):
        for override in way if len(way) > 1 else ():
            others = [each for each in way if each != override]
            assert taken(load([*RUN, "parallelism=ddp", *others]), 2) > room


def test_where_nothing_fits_the_least_is_said() -> None:
    lines = memory_advice(load([*RUN, "trainer.host_memory_limit=0.51"]), 1)
    assert lines[1].startswith("no override that was tried is predicted to fit; the least memory: ")
    assert "data.micro_batch_size=1" in lines[1]


def test_what_a_run_already_has_is_no_advice(monkeypatch) -> None:
    """Memory ran out although it should have been enough: each way changes something."""
    monkeypatch.setattr(advice, "_taken", lambda *_: (0, RankBytes(1, 1, 1, 1)))
    config = load([*RUN, "data.micro_batch_size=2", "parallelism=zero1"])
    micro, recomputation, zero = suggested(memory_advice(config, 2))
    assert micro == ["data.micro_batch_size=1"]
    assert recomputation == ["parallelism.activation_checkpointing=selective"]
    assert zero == ["parallelism.zero=2"]


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_what_ran_had_the_dtype_that_the_run_chose(dtype, name) -> None:
    config = load([*RUN, "precision=auto"])
    work = workload_of(config, check_world(config, 1), assumed())
    assert running(work, config, Policy(dtype, "")).dtype == name
    given = load([*RUN, "precision=bf16"])
    assert running(replace(work, dtype="fp16"), given, Policy(dtype, "")).dtype == "fp16"


def test_it_never_hides_what_it_explains() -> None:
    assert advice_lines(load([*RUN, "parallelism.tensor=2"]), 3) == []


def test_the_vocabulary_is_the_data_s(tmp_path) -> None:
    """With GPT-2's, nothing would have fitted where a sibling did."""
    folder = write_folder(tmp_path / "a")
    given = ["data=tokens", f"data.path={folder}", "model.num_layers=2", "model.d_model=64", "precision=fp32"]
    lines = memory_advice(load([*given, "data.micro_batch_size=16", "trainer.host_memory_limit=0.52"]), 1)
    assert "assumed" not in lines[0]
    assert suggested(lines)
