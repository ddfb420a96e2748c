"""500 steps on Shakespeare in fp16, and at Apex's levels, beside fp32. The figures are in docs/benchmarks_training.md.

`python tests/trainer/test_half_curves.py [PRECISION ...]` prints them.
"""

import sys
import tempfile
from pathlib import Path

import pytest
import torch

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.metrics.jsonl import read_rows
from gptlite.start.pretrain import pretrain

STEPS = 500
WITHIN = 0.01  # relative, of every step's loss
# The default run's text, tokens and schedule; a model and a batch that a CPU without fast fp16 trains in minutes.
RUN = f"""
data=shakespeare data.global_batch_size=8 data.micro_batch_size=8 data.sequence_length=64 model.sequence_length=64
model=gpt-lite model.num_layers=2 model.num_heads=4 model.d_model=64 optimizer.lr=2e-3 trainer.max_steps={STEPS}
trainer.log_interval=1 trainer.eval_interval=0 trainer.eval_samples=64 trainer.sample_tokens=0
""".split()


def rows(folder: Path, precision: str) -> list[dict]:
    """The rows of a run's metrics.jsonl, the evaluation at its end the last."""
    config = load([*RUN, f"precision={precision}", f"run.dir={folder / precision}", f"run.name={precision}"])
    assert pretrain(config).exit_code == 0
    return read_rows(folder / precision / "metrics.jsonl")


def largest_difference(ours: list[dict], theirs: list[dict]) -> tuple[float, int]:
    """Relative, of the loss of a step, and which; the evaluation counts as one step more."""
    curves = [[row.get("loss", row.get("val_loss")) for row in each] for each in (ours, theirs)]
    assert len(curves[0]) == len(curves[1]) == STEPS + 1
    return max((abs(a - b) / b, step) for step, (a, b) in enumerate(zip(*curves, strict=True), start=1))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_curves_are_within_a_hundredth_of_fp32s(tmp_path):
    try:
        exact = rows(tmp_path, "fp32")
    except ConfigError as error:
        pytest.skip(f"no Shakespeare here: {error}")
    assert exact[-1]["val_loss"] < 6  # of 8.3 before
    for precision in ("fp16", "amp_o1", "amp_o2"):
        assert largest_difference(rows(tmp_path, precision), exact)[0] < WITHIN, precision


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        reference = rows(Path(temporary), "fp32")
        for name in sys.argv[1:] or ["fp16", "amp_o1", "amp_o2"]:
            found = rows(Path(temporary), name)
            error, step = largest_difference(found, reference)
            scale, skipped = found[-2]["loss_scale"], found[-2]["skipped_steps"]
            ours, theirs = (each[-1]["val_loss"] for each in (found, reference))
            print(f"{name}: at most {error:.2e} from fp32, at step {step}; held-out {ours:.4f} beside {theirs:.4f}")
            print(f"{name}: loss scale at the end {scale:g}, {skipped} steps skipped")
