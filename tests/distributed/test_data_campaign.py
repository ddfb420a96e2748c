"""Processes trained on 8, 4, 6, then 1 rank and killed between: what they were fed is what an uninterrupted run was."""

import json
import random
from pathlib import Path

import pytest
from token_folders import write_folder

from distributed.cells.commands import HERE, Run, Start, losses
from gptlite.data.order_log import read_order

RANK = str(HERE / "fed_rank.py")
BATCH, STEPS, INTERVAL = 24, 48, 4
BASE = f"""
data=tokens data.global_batch_size={BATCH} data.sequence_length=16
model=gpt-lite model.num_layers=2 model.num_heads=2 model.d_model=32 model.sequence_length=16
schedule=constant schedule.warmup_steps={STEPS - 1} optimizer.lr=1e-3 precision=fp32 run.name=campaign
trainer.max_steps={STEPS} trainer.log_interval=1 trainer.eval_samples=4 trainer.sample_tokens=0
checkpoint.interval={INTERVAL} checkpoint.keep=0
""".split()
SECONDS = 240  # for any one thing, on a machine with other work

Sample = tuple[int, str]  # its number, and the digest of its tokens and targets


def read(path: Path) -> list[tuple[int, int, list[int], list[str]]]:
    """What a rank was fed; a line that a kill has cut short is nothing."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def fed(logs: Path, world: int) -> dict[int, list[Sample]]:
    """By step, counted from 0: the samples that all ranks were fed, their parts of each micro-batch side by side."""
    parts = {}
    for rank in range(world):
        for consumed, micro, numbers, texts in read(logs / f"{rank}.jsonl"):
            parts.setdefault(consumed // BATCH, {})[micro, rank] = list(zip(numbers, texts, strict=True))
    return {step: [pair for key in sorted(of) for pair in of[key]] for step, of in parts.items()}


def kill_at(command: Run, logs: Path, world: int, checkpoint: Path, step: int) -> None:
    """SIGKILL to every process once the checkpoint is there and each rank has been fed something of the step."""
    command.until(checkpoint, timeout=SECONDS)
    paths = [logs / f"{rank}.jsonl" for rank in range(world)]
    command.wait_for(lambda: all((lines := read(path)) and lines[-1][0] >= step * BATCH for path in paths), SECONDS)
    assert command.process.poll() is None, command.process.communicate()
    command.kill()


@pytest.mark.long
def test_kills_between_data_degrees_lose_and_repeat_no_sample(start: Start, tmp_path: Path):
    web, code = write_folder(tmp_path / "web"), write_folder(tmp_path / "code")
    folder, draw = tmp_path / "run", random.Random(8)

    def train(world: int, logs: Path, run_dir: Path) -> Run:
        logs.mkdir()
        blend = f"data.blend={{{web}: 0.7, {code}: 0.3}}"
        return start(RANK, str(logs), str(world), *BASE, blend, f"parallelism.data={world}", f"run.dir={run_dir}")

    alone = train(1, tmp_path / "whole-fed", tmp_path / "whole")
    exit_code, _, errors = alone.end(SECONDS)
    assert exit_code == 0, errors
    whole = fed(tmp_path / "whole-fed", 1)
    assert [number for step in range(STEPS) for number, _ in whole[step]] == list(range(BATCH * STEPS))

    applied: dict[int, list[Sample]] = {}
    begin, repeated = 0, 0
    for world in (8, 4, 6, 1):
        logs = tmp_path / f"fed-{world}"
        command = train(world, logs, folder)
        if world == 1:
            exit_code, _, errors = command.end(SECONDS)
            assert exit_code == 0, errors
        else:
            saved = begin + INTERVAL
            checkpoint = folder / "checkpoints" / f"step-{saved:08d}"
            kill_at(command, logs, world, checkpoint, saved + draw.randrange(1, INTERVAL))
        steps = fed(logs, world)
        assert min(steps) == begin, f"on {world} ranks"  # the newest checkpoint, and none before it
        repeated += len(applied.keys() & steps.keys())
        applied |= steps
        begin = int((folder / "checkpoints" / "latest").read_text().removeprefix("step-"))
    numbers = [number for step in sorted(applied) for number, _ in applied[step]]
    assert set(range(BATCH * STEPS)) - set(numbers) == set()
    assert len(numbers) == len(set(numbers))
    assert applied == whole
    assert repeated >= 3  # each kill was past a checkpoint
    assert len(read_order(folder)) == 1
    assert len((folder / "data_order.jsonl").read_text().splitlines()) == 1
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
