"""Data degree 8, 4, 6, then 1, with kills between: the samples that were applied are those of an uninterrupted run."""

import random

import numpy as np
import torch

from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import Loader, Share
from gptlite.data.stream import SampleStream

LENGTH, BATCH, STEPS = 8, 24, 48
TOKENS = {"a": np.arange(4001), "b": 5000 + np.arange(901)}


def loaders(degree, history, consumed):
    """Those of all ranks, made anew, as after a kill."""
    sets = {name: (f"sha {name}", tokens, 1.0 + 2 * (name == "a")) for name, tokens in TOKENS.items()}
    ranks = [
        Loader(
            SampleStream.begin(3, LENGTH, sets),
            {"a": TOKENS["a"]},
            schedule=BatchSchedule(BATCH),
            micro_batch_size=1,
            token_bytes=np.zeros(6000),
            device=torch.device("cpu"),
            share=Share(rank, degree),
        )
        for rank in range(degree)
    ]
    for each in ranks:
        each.resume(history, consumed)
    return ranks


def applied(ranks, consumed):
    """What all ranks read in the step after `consumed` samples: (sample number, its tokens)."""
    batches = [each.batch(consumed, m) for m in range(ranks[0].num_micro_batches) for each in ranks]
    return [(int(batch.sample_ids[0]), batch.tokens[0].tolist()) for batch in batches]


def run(degrees, seed):
    """The applied log; each degree trains a share of the steps and is killed up to 9 steps past its checkpoint."""
    draw, log, history, step = random.Random(seed), {}, [], 0
    for number, degree in enumerate(degrees, 1):
        ranks, saved = loaders(degree, history, step * BATCH), STEPS * number // len(degrees)
        for done in range(step, min(saved + draw.randrange(10) * (number < len(degrees)), STEPS)):
            log[done] = applied(ranks, done * BATCH)  # a step done again overwrites what was lost
        history, step = ranks[0].stream.eras, saved
        for each in ranks:
            each.close()
    return [sample for step in sorted(log) for sample in log[step]]


def test_no_sample_is_missing_or_repeated_over_a_campaign_of_kills():
    whole = run([1], 0)
    assert [number for number, _ in whole] == list(range(BATCH * STEPS))
    for seed in range(2):
        assert run([8, 4, 6, 1], seed) == whole
