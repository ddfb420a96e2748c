"""Equal bits of losses, norms, gradients and values on all data-parallel layouts."""

from collections.abc import Callable, Iterator

import pytest
from distributed.cells.run import Ranks

from deterministic.cases import FAULTS, ON, Bits, difference

P = "parallelism."
# The first of each group runs in one process, with passes of 24 samples as far as data.micro_batch_size is concerned.
GROUPS: dict[str, tuple[str, list[str]]] = {
    "zero": (
        "",
        [
            *(f"{P}data={data} {P}zero={zero}" for data in (2, 3, 4, 8) for zero in range(4)),
            f"{P}data=4 {P}zero=1 {P}dp_replicate=2",
            f"{P}data=4 {P}zero=2 {P}dp_replicate=2 data.micro_batch_size=3",
            f"{P}data=6 {P}zero=3 {P}dp_replicate=3 data.micro_batch_size=4",
            f"{P}data=2 {P}zero=3 {P}offload=cpu",
            f"{P}data=1 {P}zero=3 {P}offload=cpu",
            f"{P}data=2 {P}zero=3 {P}bucket_layers=2 {P}activation_checkpointing=full",
        ],
    ),
    "pipeline": (
        "model.num_layers=4 model.tied_embeddings=false data.micro_batch_size=1",
        [
            f"{P}pipeline=2",
            f"{P}pipeline=2 {P}data=2 {P}zero=1",
            f"{P}pipeline=2 {P}data=3 {P}zero=3",
            f"{P}pipeline=2 {P}data=2 {P}zero=2 {P}schedule=interleaved_1f1b",
            f"{P}pipeline=4 {P}data=2 {P}schedule=gpipe",
        ],
    ),
    "reference ops": ("ops=reference", [f"{P}data=3 {P}zero=3"]),
    "no clipping": ("optimizer.clip_norm=0", [f"{P}data=3 {P}zero=2"]),
    "sgd": ("optimizer=sgd", [f"{P}data=3 {P}zero=3"]),
    "muon": ("optimizer=muon ops=reference", [f"{P}data=3 {P}zero=3"]),
    "lion": ("optimizer=lion", [f"{P}data=3 {P}zero=3"]),
    "modern": (
        "model.norm=rms_norm model.position=rope model.mlp=swiglu model.kv_heads=2 model.bias=false model.z_loss=0.01",
        [f"{P}data=3 {P}zero=3"],
    ),
    "experts": (
        "model.moe.experts=8 model.moe.top_k=2 model.moe.d_ff=16 model.moe.shared=1 model.moe.sequence_loss=0.1 "
        "model.moe.z_loss=0.01 model.moe.bias_rate=0.01",
        [f"{P}data=3 {P}zero=3", f"{P}data=4 {P}zero=1"],
    ),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], Ranks]]:
    """Ranks of a world. Besides one process, only those last asked for run."""
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        for other in [each for each in started if 1 < each != world > 1]:
            started.pop(other).close()
        return started.setdefault(world, Ranks(world))

    yield of
    for each in started.values():
        each.close()


def run(worlds: Callable[[int], Ranks], words: str, fault: str = "") -> list[Bits]:
    data = [] if f"{P}data=" in words else [f"{P}data=1"]
    return worlds(world_of(words)).run("deterministic.cases:steps", [*ON, *data, *words.split()], fault, timeout=240)[0]


@pytest.mark.parametrize("layout", [f"{P}data=2 {P}zero=0 data.micro_batch_size=4", f"{P}data=3 {P}zero=3"])
def test_bits_are_those_of_one_process(worlds: Callable[[int], Ranks], alone: list[Bits], layout: str):
    assert difference(run(worlds, layout), alone) == ""


@pytest.fixture(scope="module")
def alone(worlds: Callable[[int], Ranks]) -> list[Bits]:
    """One process."""
    return run(worlds, "data.micro_batch_size=24")


@pytest.mark.parametrize("fault", [each for each in FAULTS if each])
def test_a_sum_that_depends_on_the_layout_is_found(worlds: Callable[[int], Ranks], alone: list[Bits], fault: str):
    words = f"{P}data=2 {P}zero={1 if fault == 'rounded twice' else 2}"
    found = difference(run(worlds, words, fault), alone)
    assert found.startswith("step 1: " + {"float norm": "gradient norm", "float loss": "loss"}.get(fault, ""))


def world_of(words: str) -> int:
    """The number of ranks of a layout."""
    degrees = dict(each.removeprefix(P).split("=") for each in words.split() if each.startswith(P))
    return int(degrees.get("data", 1)) * int(degrees.get("pipeline", 1))


# Ranks are started once for each world.
LAYOUTS = sorted(((group, each) for group in GROUPS for each in GROUPS[group][1]), key=lambda pair: world_of(pair[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "layout"), LAYOUTS)
def test_bits_of_all_layouts_are_those_of_one_process(
    worlds: Callable[[int], Ranks], references: dict[str, list[Bits]], group: str, layout: str
):
    shared = GROUPS[group][0]
    if group not in references:
        references[group] = run(worlds, shared)
    assert difference(run(worlds, f"{shared} {layout}"), references[group]) == ""


@pytest.fixture(scope="module")
def references() -> dict[str, list[Bits]]:
    """Bits of one process, by group."""
    return {}
