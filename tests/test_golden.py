"""The golden curve: fp32 losses of a small run, the same on every machine to 1e-4.

A refactor must not move it. To regenerate after a change that means to: python tests/test_golden.py
"""

import json
import random
import tempfile
from pathlib import Path

import pytest
from run_files import read_metrics, without_plots

CURVE = Path(__file__).parent / "losses" / "small-fp32.json"
WORDS = "the king and queen of a far land sent their old knight to find what no one had seen".split()


RUN = """
data=text data.tokenizer=byte data.global_batch_size=8 data.micro_batch_size=4
model=gpt-lite model.num_layers=4 model.d_model=64 model.sequence_length=64 model.dropout=0.1 precision=fp32
optimizer.lr=1e-3 schedule=constant schedule.warmup_steps=100 trainer.max_steps=101 trainer.log_interval=1
trainer.eval_interval=0 trainer.eval_samples=8 trainer.sample_tokens=0
""".split()


def losses(folder: Path) -> list[float]:
    """Trains 101 steps on made-up sentences; dropout, accumulation, biases and the tied head all take part."""
    from gptlite.config import load
    from gptlite.start.pretrain import pretrain

    draw = random.Random(7)
    text = folder / "text.txt"
    text.write_text("".join(" ".join(draw.choices(WORDS, k=draw.randint(4, 9))) + ".\n" for _ in range(900)))
    overrides = [*RUN, f"data.path={text}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / 'run'}"]
    assert pretrain(load(overrides)).exit_code == 0
    return [row["loss"] for row in read_metrics(folder / "run") if "loss" in row]


def test_the_golden_curve(tmp_path: Path) -> None:
    golden = json.loads(CURVE.read_text())
    assert golden[-1] < golden[0] - 2  # it is a curve of learning
    with without_plots():
        assert losses(tmp_path) == pytest.approx(golden, rel=1e-4)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        CURVE.write_text(json.dumps([round(loss, 6) for loss in losses(Path(temporary))]) + "\n")
    print(CURVE.read_text())
