"""Sums of gradients behind the seam, gptlite/parallelism/reduction.py: dense ones give the bits of FSDP2's own."""

from unittest import mock

import pytest

from distributed.cells.layouts import BASE
from distributed.cells.run import Ranks
from distributed.cells.steps import built
from gptlite.config import Config, load
from gptlite.config.trainer import NOISES
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.compressed import build
from gptlite.satellites.compressed.buckets import Bucket, BucketReduction

STEPS = 3


def steps(config: Config, replaced: bool) -> tuple[list[tuple[float, float]], int]:
    """Loss and gradient norm of each step, and how often gradients were summed behind the seam."""
    count = 0

    def seen(*_: object) -> None:
        nonlocal count
        count += 1

    class Counting(BucketReduction):
        def scatter(self, bucket: Bucket, *args: object) -> None:
            seen()
            super().scatter(bucket, *args)  # type: ignore[arg-type]

        def sum(self, bucket: Bucket, *args: object) -> None:
            seen()
            super().sum(bucket, *args)  # type: ignore[arg-type]

    ours = mock.patch.object(build, "build_reduction", lambda _, mesh: Counting(mesh))
    asked = mock.patch("gptlite.trainer.build.REDUCTIONS", [(build.__name__, lambda _: replaced)])
    with ours, asked, built(config) as (_, state, step):
        results = [step(state) for _ in range(STEPS)]
    return [(each.loss, each.grad_norm) for each in results], count


ASKED = {
    "parallelism=zero2": [],
    "parallelism=zero2 parallelism.compression=int8": ["compressed.build"],
    "parallelism=zero3 parallelism.zeropp.weights=int8": ["zeropp.build"],
    "parallelism=ddp optimizer=onebit_adam": ["onebit.reduction"],
    "parallelism=zero2 trainer.noise_scale=true": ["noise.build"],
}


@pytest.mark.parametrize("words", ASKED)
def test_a_run_imports_no_builder_that_its_keys_do_not_ask_for(words: str):
    config = load(["run.dir=unused", *words.split()])
    asked = [name.removeprefix("gptlite.satellites.") for name, asks in REDUCTIONS if asks(config)]
    assert asked == ASKED[words]
    assert [name for name, asks in NOISES if asks(config)] == [f"gptlite.satellites.{n}" for n in asked if "noise" in n]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_dense_sums_behind_the_seam_have_the_bits_of_fsdp2s(two: Ranks, zero: int):
    words = [*BASE, "parallelism.data=2", f"parallelism.zero={zero}", "data.micro_batch_size=1"]
    own = two.run("distributed.test_reduction:steps", load(words), False)
    replaced = two.run("distributed.test_reduction:steps", load(words), True)
    assert own[0][1] == 0
    assert replaced[0][1] > 0
    assert replaced[0][0] == own[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("more", [["parallelism.dp_replicate=2"], ["parallelism.tensor=2"], ["parallelism.pipeline=2"]])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_dense_sums_of_other_layouts_have_the_bits_of_fsdp2s(four: Ranks, zero: int, more: list[str]):
    data = 4 if more[0].startswith("parallelism.dp") else 2
    words = [*BASE, f"parallelism.data={data}", f"parallelism.zero={zero}", "data.micro_batch_size=1"]
    words += [] if zero == 0 and data == 4 else more
    own = four.run("distributed.test_reduction:steps", load(words), False, timeout=200)
    replaced = four.run("distributed.test_reduction:steps", load(words), True, timeout=200)
    assert own[0][1] == 0
    assert replaced[0][1] > 0
    assert [each[0] for each in replaced] == [each[0] for each in own]
