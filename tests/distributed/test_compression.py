"""parallelism.compression: compressed gradients with error feedback, on every layout."""

import re
from pathlib import Path

import pytest

from distributed.cells.compression import error_sums
from distributed.cells.layouts import BASE
from distributed.cells.run import Ranks
from gptlite.config import load
from gptlite.start.pretrain import pretrain

CASES = "distributed.cells.compression"
STEPS = 30
ROUNDING = 1e-6  # of fp32, relative to the sum of absolute inputs over all steps


def words(layout: str, *more: str) -> list[str]:
    return [*BASE, "model.num_layers=4", *(f"parallelism.{each}" for each in layout.split()), *more]


@pytest.mark.parametrize(
    ("codec", "zero"), [(codec, zero) for codec in ("bf16", "int8", "int4") for zero in (0, 3)] + [("powersgd", 0)]
)
def test_what_is_sent_and_the_errors_are_what_went_in(two: Ranks, codec: str, zero: int):
    layout = words(f"data=2 zero={zero} compression={codec}", "data.micro_batch_size=12")
    results = two.run(f"{CASES}:train", load(layout), 3)
    for each in results:
        assert each.worst < ROUNDING
        assert each.sent == each.planned > 0


def same_sums(first: str, second: str) -> None:
    """Two checkpoints have the same sums of errors."""
    before, after = error_sums(first), error_sums(second)
    assert before.keys() == after.keys() != set()
    for name, each in before.items():
        assert (after[name] - each).norm() <= 1e-6 * each.norm()
    assert any(each.norm() > 0 for each in before.values())


def chain(ranks: Ranks, layouts: list[str], folder: Path, *more: str) -> None:
    """Each layout goes on from the errors of the one before, and from its own to the bit."""
    source = None
    for number, layout in enumerate(layouts):
        config = load(words(layout if "compression" in layout else f"{layout} compression=int4", *more))

        def run(name: str, *args: object, config=config, number=number) -> list:
            return ranks.run(f"{CASES}:go_on", config, str(folder / f"{number}-{name}"), *args, timeout=200)

        if source is not None:
            taken, *_ = run("taken", source, 0, 0)
            assert taken.notes == []
            same_sums(source, taken.path)
        whole = run("whole", source, 3, 2)
        again = run("again", source := whole[0].path, 0, 2)
        assert [(each.losses, each.errors) for each in again] == [(each.losses, each.errors) for each in whole]
        same_sums(source, again[0].path)


def test_errors_of_gradients_are_not_taken_for_those_of_momenta(two: Ranks, tmp_path: Path):
    """The optimizers' states have one format, so a run may change from one to the other."""
    gradients = words("data=2 compression=int8")
    momenta = words("data=2", "optimizer=onebit_adam", "optimizer.freeze_step=1", "schedule.warmup_steps=0")

    def run(layout: list[str], name: str, source: str | None, steps: int) -> list:
        return two.run(f"{CASES}:go_on", load(layout), str(tmp_path / name), source, steps, 0)

    signs, integers = run(momenta, "signs", None, 3)[0], run(gradients, "integers", None, 1)[0]
    assert signs.errors != {} != integers.errors
    assert run(momenta, "from integers", integers.path, 0)[0].errors == {}
    fresh = run(gradients, "from signs", signs.path, 0)[0]
    assert fresh.notes == ["the checkpoint has no compression errors; they begin at 0"]
    assert set(fresh.errors.values()) <= set(run(gradients, "zeros", None, 0)[0].errors.values())


def test_a_run_resumes_to_the_bit_and_another_zero_stage_takes_its_errors(two: Ranks, tmp_path: Path):
    chain(two, ["data=2 zero=3", "data=2 zero=0"], tmp_path, "data.micro_batch_size=24")


def test_errors_begin_and_end_with_the_key(two: Ranks, tmp_path: Path):
    dense, compressed = (load(words(f"data=2 zero=1 compression={codec}")) for codec in ("none", "int8"))
    first = two.run(f"{CASES}:go_on", dense, str(tmp_path / "dense"), None, 1, 0)[0]
    begun = two.run(f"{CASES}:go_on", compressed, str(tmp_path / "begun"), first.path, 1, 0)[0]
    assert begun.notes == ["the checkpoint has no compression errors; they begin at 0"]
    assert all(each.norm() > 0 for each in error_sums(begun.path).values())
    ended = two.run(f"{CASES}:go_on", dense, str(tmp_path / "ended"), begun.path, 1, 0)[0]
    assert ended.notes == ["the checkpoint's compression errors are dropped"]
    assert error_sums(ended.path) == {}


@pytest.mark.slow
def test_any_layout_takes_the_errors_of_any_other(four: Ranks, tmp_path: Path):
    layouts = [
        "data=4 zero=1",
        "data=2 tensor=2 zero=3 sequence=true",
        "data=2 pipeline=2 zero=0",
        "data=4 dp_replicate=2 zero=2",
        "data=2 tensor=2 zero=0",
        "data=2 pipeline=2 zero=2 schedule=zbv",
        "data=4 zero=3",
    ]
    chain(four, layouts, tmp_path, *UNEVEN, "data.micro_batch_size=6")


LAYOUTS = [
    *(f"data=4 zero={zero}" for zero in range(4)),
    *(f"data=4 dp_replicate=2 zero={zero}" for zero in (1, 3)),
    *(f"data=2 tensor=2 zero={zero} sequence={on}" for zero in (0, 2) for on in ("true", "false")),
    *(f"data=2 pipeline=2 zero={zero}" for zero in (0, 3)),
    "data=2 pipeline=2 zero=2 schedule=zbv",
    "data=2 context=2 zero=2 bucket_layers=2",
]
# 17 rows, which two tensor ranks store in two blocks and in one; and weights whose gradients come from some heads.
UNEVEN = ["data.vocab_size=17", "model.vocab_multiple=1", "model.qk_norm=true"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_train_nearly_as_dense_sums_do(four: Ranks, layout: str, codec: str):
    more = [*UNEVEN, "data.micro_batch_size=6"]
    dense = four.run(f"{CASES}:train", load(words(layout, *more)), STEPS, timeout=200)
    results = four.run(f"{CASES}:train", load(words(f"{layout} compression={codec}", *more)), STEPS, timeout=200)
    distance = max(abs(a - b) for a, b in zip(results[0].losses, dense[0].losses, strict=True))
    print(f"{layout} {codec}: losses up to {distance:.1e} from dense; worst sum {max(r.worst for r in results):.1e}")
    for each in results:
        assert each.worst < ROUNDING
        assert each.sent == each.planned > 0
        assert each.losses != dense[0].losses
    assert distance < {"int8": 1e-2, "int4": 5e-2}[codec]


SHORT = "model.num_layers=2 schedule.warmup_steps=0 trainer.sample_tokens=0 trainer.eval_interval=0".split()


def pretrained(overrides: list[str]) -> int:
    """The exit code of a run on every rank, which a later one may go on with."""
    return pretrain(load(overrides)).exit_code


def test_a_run_says_what_it_sends_and_that_the_codec_has_changed(two: Ranks, tmp_path: Path):
    tiny = [*BASE, *SHORT, f"run.dir={tmp_path}"]
    tiny += ["parallelism.data=2", "parallelism.zero=1", "checkpoint.interval=0", "data.micro_batch_size=24"]
    for steps, codec in ((1, "int8"), (2, "bf16")):
        run = [*tiny, f"parallelism.compression={codec}", f"trainer.max_steps={steps}"]
        assert two.run("distributed.test_compression:pretrained", run) == [0, 0]
    log = (tmp_path / "train.log").read_text()

    (sends, later) = [line for line in log.splitlines() if "compression: " in line]
    assert "compression: int8 between 2 data ranks, with error feedback: this rank sends " in sends
    assert "of fp32; errors take" in sends
    assert "compression: bf16" in later
    assert "parallelism.compression=bf16 (was int8): the loss curve will differ" in log


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "parallelism.zero=3 parallelism.zeropp.weights=int8 parallelism.zeropp.node_size=1",
            r"ZeRO\+\+: weights=int8 on 2 nodes of 1 data rank each: this rank sends 0 B per step inside its node, and "
            r"[1-9][\d.]* \wiB to other nodes\n",
        ),
        (
            "optimizer=zero_one_adam optimizer.freeze_step=2 optimizer.local_step_clipper=8",
            r"momenta: signs between 2 data ranks, .* after step 2 \(optimizer.freeze_step\), and from then on in "
            r"every step to one of 8; this rank then sends [1-9][\d.]* \w*B per step, 0\.0\d+ of the ",
        ),
        ("optimizer=sgd optimizer.adascale=true", r"noise: the gradient noise scale is measured .*; AdaScale mult"),
    ],
)
def test_a_run_says_what_it_sends_otherwise(two: Ranks, tmp_path: Path, overrides: str, line: str):
    tiny = [*BASE, *SHORT, f"run.dir={tmp_path}", "parallelism.data=2", "checkpoint.interval=0"]
    tiny += ["trainer.max_steps=3", "data.micro_batch_size=24", *overrides.split()]
    assert two.run("distributed.test_compression:pretrained", tiny) == [0, 0]
    assert len(re.findall(line, (tmp_path / "train.log").read_text())) == 1


def test_a_single_rank_that_exchanges_no_momenta_says_so(tmp_path: Path):
    tiny = [*BASE, *SHORT, f"run.dir={tmp_path}", "trainer.max_steps=3", "checkpoint.interval=0"]
    assert pretrained([*tiny, "optimizer=onebit_adam"]) == 0
    line = (
        "momenta: not exchanged, although optimizer=onebit_adam: there is a single data rank; second moments are fixed"
    )
    assert line in (tmp_path / "train.log").read_text()


def test_a_single_rank_says_that_it_sends_nothing(tmp_path: Path):
    tiny = [*BASE, *SHORT, f"run.dir={tmp_path}"]
    assert pretrained([*tiny, "parallelism.compression=int4", "trainer.max_steps=1", "checkpoint.interval=0"]) == 0
    line = "compression: none, although parallelism.compression=int4: a single data rank sends no gradients"
    assert line in (tmp_path / "train.log").read_text()


def test_an_engine_compresses_too(two: Ranks, tmp_path: Path):
    """A module with a frozen parameter, and one that it uses twice."""
    dense = two.run("engine.loops:train", "net", 4, "parallelism=zero2")[0]["curve"]
    compressed = ["net", 4, "parallelism=zero2", "parallelism.compression=int4"]
    whole = two.run("engine.loops:train", *compressed)[0]["curve"]
    assert whole != pytest.approx(dense, rel=1e-4)
    assert whole == pytest.approx(dense, rel=0.05)
    two.run("engine.loops:train_with", {"save": str(tmp_path)}, "net", 2, *compressed[2:])
    resumed = two.run("engine.loops:train_with", {"load": str(tmp_path)}, *compressed)[0]["curve"]
    assert resumed == whole[4:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "parallelism.offload=cpu parallelism.zero=2",
        "precision=bf16 precision.master_weights=false parallelism.zero=1",
        "trainer.compile=true parallelism.activation_checkpointing=full parallelism.zero=3",
    ],
)
def test_settings_beside_the_layout(two: Ranks, more: str):
    layout = words("data=2 compression=int4", "data.micro_batch_size=12", *more.split())
    for each in two.run(f"{CASES}:train", load(layout), 3, timeout=300):
        assert each.worst < ROUNDING
        assert each.sent == each.planned > 0
