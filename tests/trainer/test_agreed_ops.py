"""Ranks that cannot all run the same kernels."""

from dataclasses import replace

import pytest

from gptlite.ops.config import CrossEntropy, Implementation, OpsConfig
from gptlite.ops.select import Ops
from gptlite.parallelism.rank_sync import ALONE
from gptlite.trainer import parts

FUSED = Ops(cross_entropy=CrossEntropy.fused, layer_norm=True, adamw=True, chosen=(("all", "fused"),))


@pytest.fixture
def ranks(monkeypatch):
    def pretend(*others: Ops) -> None:
        plain = Ops(cross_entropy=CrossEntropy.reference, chosen=(("all", "reference"),))
        reference = Implementation.reference

        def choose(config, device, documents):
            return plain if config.implementation is reference else FUSED

        monkeypatch.setattr(parts, "select_ops", choose)
        monkeypatch.setattr(parts, "gather_objects", lambda mesh, mine: [mine, *map(str, others)])

    return pretend


def test_what_all_can_run_runs(ranks):
    ranks(replace(FUSED, chosen=()))
    assert parts.agreed_ops(OpsConfig(), ALONE) is FUSED


def test_where_one_cannot_all_take_the_reference_and_say_why(ranks):
    ranks(Ops())
    agreed = parts.agreed_ops(OpsConfig(), ALONE)
    assert (agreed.cross_entropy, agreed.layer_norm, agreed.adamw) == (CrossEntropy.reference, False, False)
    assert "rank 1 cannot run the same kernels" in agreed.reasons[-1]
