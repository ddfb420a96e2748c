"""A run that goes on from a checkpoint is the uninterrupted run: to the bit on one layout, to rounding on another."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from marking import marked
from run_files import differing, read_metrics

from distributed.cells.commands import TRAIN, Start, losses
from distributed.cells.fed_rank import Fed, feeding
from distributed.cells.reshard_pairs import SINGLE, Layout
from distributed.cells.run import GrowingRanks
from distributed.cells.steps import joined
from gptlite.config import Config, load
from gptlite.data.loader import Loader
from gptlite.parallelism.layout import resolve
from gptlite.start.pretrain import pretrain
from gptlite.trainer.signals import StopSignal


@dataclass(frozen=True)
class Trained:
    """A rank's exit code, which part of the global batch it reads, and what it was fed, in order."""

    code: int
    data_rank: int
    data_size: int
    fed: list[Fed]


def train(config: Config, world: int, name: str, stop_at: int | None = None) -> Trained | None:
    """On the first `world` ranks: `pretrain`. In step `stop_at` the last of them gets a SIGTERM."""
    fed: list[Fed] = []
    rank = int(os.environ["RANK"])

    def note(loader: Loader, given: Fed) -> None:
        begins = stop_at is not None and given.consumed == loader.schedule.after(0, stop_at - 1) and given.micro == 0
        if begins and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        fed.append(given)

    with joined(world, name) as is_in, feeding(note):
        if not is_in:
            return None
        layout = resolve(config.parallelism, world)
        inner = layout.context * layout.size("tp")
        code = pretrain(config, stop_signal=StopSignal()).exit_code
        return Trained(code, rank // inner % layout.data_size, layout.data_size, fed)


# The rate is that of a warm-up as long as the run: at its peak from the start, Adam makes of the rounding of a tiny
# gradient a whole step. 12 samples a batch: for 1, 2, 3, 4 or 6 data ranks.
BASE = """
data=synthetic data.vocab_size=37 data.num_tokens=8000 data.global_batch_size=12 data.sequence_length=16
model=gpt-lite
model.num_layers=5 model.num_heads=4 model.d_model=32 model.sequence_length=16 model.dropout=0.1 model.vocab_multiple=1
schedule=constant schedule.warmup_steps=29 optimizer.lr=3e-4 precision=fp32 run.name=continue
trainer.max_steps=30 trainer.log_interval=1 trainer.eval_interval=10 trainer.eval_samples=12 trainer.sample_tokens=0
checkpoint.interval=15 checkpoint.keep=0
""".split()
EXPERTS = "model.moe.experts=4 model.moe.d_ff=32 model.moe.bias_rate=0.01 model.moe.z_loss=1e-3".split()
HALF, END = 15, 30
EQUAL = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss", "val_bits_per_byte")  # of a row, what repeats
CLOSE = 1e-5  # relative


@dataclass(frozen=True)
class Run:
    """A layout, how many samples of a data rank go through it at once, and whether the model has experts."""

    layout: Layout
    micro: int
    experts: bool = False

    @property
    def id(self) -> str:
        return f"{self.layout.id}_micro{self.micro}{'_experts' * self.experts}"

    def overrides(self) -> list[str]:
        more = EXPERTS if self.experts else ()
        return [*BASE, *more, *self.layout.overrides(), f"data.micro_batch_size={self.micro}"]


class Trainer:
    """Trains on ranks that stay, and remembers the uninterrupted runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = GrowingRanks((2, 4, 8))
        self._whole: dict[str, Path] = {}

    def train(self, run: Run, folder: Path, *overrides: str, stop_at: int | None = None) -> list[Trained]:
        """Every rank's share of a run, which must end as it should: in step `stop_at` a rank gets a SIGTERM."""
        world = run.layout.world
        config = load([*run.overrides(), f"run.dir={folder}", *overrides])
        trained = self.ranks.run(world, "distributed.test_continue:train", config, stop_at, timeout=250)
        assert [each.code for each in trained] == [0 if stop_at is None else 128 + signal.SIGTERM] * world
        return trained

    def whole(self, run: Run) -> Path:
        """The folder of a run's steps, with checkpoints of the middle and the last."""
        if run.id not in self._whole:
            self.train(run, self.folder / run.id)
            self._whole[run.id] = self.folder / run.id
        return self._whole[run.id]

    def close(self) -> None:
        self.ranks.close()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("runs"))
    yield trainer
    trainer.close()


def step_name(step: int) -> str:
    return f"step-{step:08}"


def rows(folder: Path) -> list[dict]:
    """What a run says of its steps and evaluations, without times and memory."""
    return [{key: row[key] for key in EQUAL if key in row} for row in read_metrics(folder)]


def other(tensor: int = 1, pipeline: int = 1, data: int = 1, zero: int = 0, micro: int = 1, **more) -> Run:
    return Run(Layout(tensor, pipeline, data, zero, **more), micro)


ALONE, ZERO3 = Run(SINGLE, 12), other(data=2, zero=3, micro=6)
SAME = [
    ALONE,
    ZERO3,
    Run(Layout(data=2, zero=1, expert=2), 6, experts=True),
    other(pipeline=2, data=2, zero=2, schedule="zbv", micro=3),
    other(tensor=2, data=2, zero=1, micro=3),
    other(tensor=2, pipeline=2, micro=3),
    other(data=4, zero=3, replicate=2, micro=1),
    other(context=2, zero=3, micro=6),
    other(context=2, tensor=2, data=2, zero=1, micro=3),
]


def path(case: tuple[Sequence[Run]]) -> str:
    """The layouts that a run goes through."""
    return "-to-".join(run.id for run in case[0])


@pytest.mark.parametrize("run", marked(SAME, slow=3, name=lambda run: run.id))
def test_more_steps_on_the_same_layout_are_the_same_bits(run: Run, trainer: Trainer, tmp_path: Path):
    whole, cut = trainer.whole(run), tmp_path / "cut"
    trainer.train(run, cut, stop_at=HALF)
    assert (cut / "checkpoints" / "latest").read_text() == f"{step_name(HALF)}\n"
    trainer.train(run, cut)
    assert "resuming with a change" not in (cut / "train.log").read_text()
    steps = [row for row in rows(cut) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, END + 1))
    assert rows(cut) == rows(whole)
    for step in (HALF, END):
        assert differing(cut, whole, step) == []


CHANGED = [
    (ALONE, other(data=2, zero=3, micro=3)),
    (ZERO3, other(tensor=2, pipeline=2, micro=3)),
    (Run(Layout(data=2, zero=1, expert=2), 6, True), Run(Layout(data=4, zero=3, expert=4), 3, True)),
    (Run(Layout(data=4, zero=3, expert=2), 3, True), Run(Layout(tensor=2, context=2, expert=2), 4, True)),
    (other(pipeline=2, data=2, micro=3), other(data=3, zero=2, micro=2)),
    (other(data=4, zero=3, micro=3), Run(SINGLE, 4)),
    (ALONE, other(tensor=2, data=2, zero=3, micro=2)),
    (other(data=3, zero=1, micro=4), other(pipeline=2, data=2, zero=3, schedule="zbv", micro=1)),
    (other(tensor=4, micro=6), other(data=4, zero=2, replicate=2, micro=1)),
    (other(pipeline=2, data=2, zero=1, schedule="zbv", micro=3), other(tensor=2, data=2, micro=3)),
    (other(pipeline=4, micro=3), other(data=2, zero=1, micro=2)),
    (other(tensor=2, pipeline=2, data=2, zero=3, micro=3), other(data=6, zero=3, micro=1)),
    (other(data=6, zero=2, micro=2), other(tensor=4, pipeline=2, micro=3)),
    (other(tensor=2, data=3, zero=3, micro=2), other(pipeline=4, data=2, zero=2, schedule="1f1b", micro=1)),
    (other(context=2, zero=3, micro=6), other(tensor=2, micro=4)),
    (other(data=4, zero=3, micro=3), other(context=4, data=2, zero=2, micro=3)),
]


@pytest.mark.parametrize("runs", marked([(each,) for each in CHANGED], slow=3, name=path))
def test_more_steps_on_another_layout_are_the_same_to_rounding(runs: tuple[Run, Run], trainer: Trainer, tmp_path: Path):
    before, after = runs
    whole = trainer.whole(before)
    trainer.train(after, tmp_path, f"checkpoint.resume={whole / 'checkpoints' / step_name(HALF)}")
    assert "resuming with a change: layout: " in (tmp_path / "train.log").read_text()
    found, expected = rows(tmp_path), [row for row in rows(whole) if row["step"] > HALF]
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    assert [row["step"] for row in found if "loss" in row] == list(range(HALF + 1, END + 1))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert {key: ours[key] for key in ("step", "tokens")} == {key: theirs[key] for key in ("step", "tokens")}
        for key in {"loss", "lr", "val_loss"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=CLOSE, abs=0), (ours["step"], key)


# One run in pieces: each is stopped by a signal, the last is not.
PIECES = [
    [Run(SINGLE, 4), other(data=2, zero=1, micro=3), other(tensor=2, micro=6)],
    [other(pipeline=2, data=2, micro=3), other(data=3, zero=2, micro=2), other(tensor=2, data=2, zero=3, micro=1)],
    [other(data=6, zero=3, micro=1), other(tensor=2, pipeline=2, data=2, micro=3), other(data=4, replicate=2, zero=2)],
]


@pytest.mark.parametrize("pieces", marked([(each,) for each in PIECES], slow=1, name=path))
def test_no_sample_is_skipped_or_repeated_where_the_data_degree_changes(
    pieces: list[Run], trainer: Trainer, tmp_path: Path
):
    # 36 samples an epoch, three steps, so that the order starts anew meanwhile.
    short = ["data.num_tokens=577", "trainer.max_steps=10", "schedule.warmup_steps=9", "checkpoint.interval=0"]
    whole = samples(trainer.train(ALONE, tmp_path / "whole", *short))
    assert [number for number, _ in whole] == list(range(120))
    assert len({text for _, text in whole}) == 36
    cut = []
    for run, stop_at in zip(pieces, (4, 7, None), strict=True):
        cut += samples(trainer.train(run, tmp_path / "cut", *short, stop_at=stop_at))
        assert len(cut) == 12 * (stop_at or 10)
    assert cut == whole


@pytest.mark.slow
def test_a_growing_batch_is_the_same_on_any_layout(trainer: Trainer, tmp_path: Path):
    """Batches of 4, 8 and 12 samples: pipeline stages change their schedule on the way, data ranks their share."""
    ramp = ["data.batch_ramp=[4,4,60]", "trainer.max_steps=16", "schedule.warmup_steps=15", "checkpoint.interval=0"]
    whole = samples(trainer.train(Run(SINGLE, 4), tmp_path / "whole", *ramp))
    assert [number for number, _ in whole] == list(range(8 * 4 + 4 * 8 + 4 * 12))
    pieces = [(other(data=2, micro=2), 4), (other(pipeline=2, data=2, micro=1), 10), (other(data=4, zero=1), None)]
    cut = []
    for run, stop_at in pieces:
        cut += samples(trainer.train(run, tmp_path / "cut", *ramp, stop_at=stop_at))
    assert cut == whole
    ours, theirs = ({row["step"]: row for row in rows(tmp_path / name) if "loss" in row} for name in ("cut", "whole"))
    assert list(ours) == list(theirs) == list(range(1, 17))
    for step, row in theirs.items():
        size = [4] * 8 + [8] * 4 + [12] * 4
        assert row["tokens"] == ours[step]["tokens"] == 16 * sum(size[:step])
        assert ours[step]["loss"] == pytest.approx(row["loss"], rel=CLOSE)


@pytest.mark.slow
def test_a_batch_that_follows_the_noise_is_the_same_on_any_layout(trainer: Trainer, tmp_path: Path):
    """Each layout compares gradients of two samples."""
    ramp = [
        "trainer.noise_scale=true", "data.batch_ramp=[4,4]", "data.ramp_steps=4", "data.ramp_factor=1",
        "trainer.max_steps=16", "schedule.warmup_steps=15", "checkpoint.interval=0", "model.tied_embeddings=false",
    ]  # fmt: skip
    whole = samples(trainer.train(Run(SINGLE, 2), tmp_path / "whole", *ramp))
    pieces = [(other(data=2, zero=2, micro=2), 5), (other(tensor=2, data=2, zero=2, micro=2), 10)]
    cut = []
    for run, stop_at in [*pieces, (other(data=2, zero=3, micro=2), None)]:
        cut += samples(trainer.train(run, tmp_path / "cut", *ramp, stop_at=stop_at))
    assert cut == whole
    ours, theirs = (
        [(row["step"], row["batch_size"], row["tokens"]) for row in read_metrics(tmp_path / name) if "loss" in row]
        for name in ("cut", "whole")
    )
    assert ours == theirs
    assert len({size for _, size, _ in theirs}) > 1
    assert [number for number, _ in whole] == list(range(sum(size for _, size, _ in theirs)))


def samples(trained: list[Trained]) -> list[tuple[int, str]]:
    """Number and text of each sample that was fed, in order: of a micro-batch, the data ranks' parts side by side."""
    parts: dict[int, list[Fed]] = {}
    for each in trained:
        assert parts.setdefault(each.data_rank, each.fed) == each.fed  # all that read the same part of a batch
    assert sorted(parts) == list(range(trained[0].data_size))
    side_by_side = zip(*(parts[rank] for rank in sorted(parts)), strict=True)
    return [pair for ranks in side_by_side for fed in ranks for pair in zip(fed.ids, fed.texts, strict=True)]


@pytest.mark.slow
def test_the_command_goes_on_in_its_folder_on_other_layouts(
    start: Start, tiny: list[str], whole: Callable, tmp_path: Path
):
    folder = tmp_path / "a"
    warm = "schedule.warmup_steps=3"

    def train(*overrides: str) -> str:
        code, _, errors = start(TRAIN, f"run.dir={folder}", *overrides).end()
        assert (code, errors) == (0, "")
        return (folder / "train.log").read_text()

    train(*tiny, warm, "run.name=a", "parallelism=zero3", "parallelism.data=2", "trainer.max_steps=4")
    log = train("parallelism=tp2_pp2", "trainer.max_steps=8")
    assert "layout: data 2 (zero 3) then, pipeline 2 x tensor 2, 1f1b now" in log
    assert f"resuming from {folder / 'checkpoints' / 'step-00000004'}" in log
    log = train("parallelism=single", "trainer.max_steps=12")
    assert "layout: pipeline 2 x tensor 2, 1f1b then, one rank now" in log
    assert f"resuming from {folder / 'checkpoints' / 'step-00000008'}" in log
    assert sorted(losses(folder)) == list(range(1, 13))
    assert losses(folder) == pytest.approx(whole(warm, "trainer.max_steps=12"), rel=CLOSE)
