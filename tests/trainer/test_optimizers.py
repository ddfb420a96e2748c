"""Every optimizer learns Shakespeare's letters."""

from contextlib import closing

import pytest

from gptlite.config import load
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.parity.record import build

SMALL = """
data=shakespeare_char data.global_batch_size=8 data.micro_batch_size=8 data.sequence_length=32
model=gpt-lite model.num_layers=1 model.num_heads=4 model.d_model=64 model.sequence_length=32 model.position=rope
model.dropout=0.0 schedule=linear schedule.warmup_steps=5 trainer.max_steps=70 precision=fp32 run.dir=unused run.name=x
""".split()
LETTERS = 3.31  # nats: the entropy of the letters' frequencies
RATES = {"adamw": 4.5e-3, "lamb": 7.5e-2, "lion": 1.5e-3, "muon": 4.5e-3, "adafactor": 4.5e-2}


@pytest.mark.parametrize("optimizer", RATES)
def test_seventy_steps_learn_more_than_the_letters_frequencies(optimizer):
    config = load([*SMALL, f"optimizer={optimizer}", f"optimizer.lr={RATES[optimizer]}"])
    state, step = build(config, build_mesh(ParallelismConfig()))
    with closing(state.loader):
        losses = [step(state).loss for _ in range(70)]
    assert losses[0] > 4.0  # of 65 letters all alike: 4.17
    assert sum(losses[-10:]) / 10 < LETTERS - 0.3
