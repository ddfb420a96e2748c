"""What FSDP2 is told; what it then does is in tests/distributed."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from gptlite.parallelism import pipeline
from gptlite.parallelism.zero import _prefetch


def test_buckets_are_gathered_ahead_of_the_passes():
    modules: list[Any] = [mock.Mock(spec=FSDPModule) for _ in range(4)]
    _prefetch(modules, 2)

    def told(method: str) -> list[list[int]]:
        return [[modules.index(other) for other in getattr(each, method).call_args[0][0]] for each in modules]

    assert told("set_modules_to_forward_prefetch") == [[1, 2], [2, 3], [3], []]
    assert told("set_modules_to_backward_prefetch") == [[], [0], [1, 0], [2, 1]]


@pytest.mark.parametrize(("zero", "reduced"), [(0, [3]), (1, [3]), (2, [1, 2, 3]), (3, [1, 2, 3])])
def test_a_split_backward_pass_reduces_once_or_for_each_micro_batch(monkeypatch, zero, reduced):
    passes, found = 0, []
    monkeypatch.setattr(PipelineStage, "backward_weight_one_chunk", lambda *_: None)
    monkeypatch.setattr(pipeline._Stage, "_held", lambda _: nullcontext())
    monkeypatch.setattr(pipeline, "accumulate_gradients_now", lambda _: None)
    monkeypatch.setattr(pipeline, "reduce_gradients_now", lambda _: found.append(passes))
    stage = pipeline._Stage.__new__(pipeline._Stage).over(mock.Mock(spec=FSDPModule), 3, zero, splits=True)
    for passes in (1, 2, 3):
        stage.backward_weight_one_chunk(passes - 1)
    assert found == reduced
