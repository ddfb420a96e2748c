"""A block that leaves its last sum and its biases to the next norm, as on a GPU: the same model, and fewer passes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from models.conftest import TINY, build, differentiated, distances, planned, policy
from torch import Tensor

from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.models.parallelize import set_dtypes
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.precision import Precision
from gptlite.torch_private.modules import compile_block

FUSED = Ops(Attention.matmul, layer_norm=True, activation=True, dropout=True)
pytestmark = pytest.mark.usefixtures("kernels")


def fused(deferred: bool, **overrides: Any) -> GPT:
    return build(ops=replace(FUSED, deferred_add=deferred), **overrides)


RMS = {"norm": Norm.rms_norm}
LLAMA = {**RMS, "position": Position.rope, "mlp": MLPKind.swiglu, "bias": False, "qk_norm": True, "kv_heads": 1}


@pytest.mark.parametrize(
    "overrides",
    [
        *({}, {"dropout": 0.2}, {"bias": False}, {"dropout": 0.2, "bias": False}),
        *({**RMS, "dropout": 0.2}, {**RMS, "norm_gain": False}, LLAMA),
    ],
    ids=str,
)
def test_the_model_is_the_same(batch, overrides):
    """With the same dropout: other masks would be far off."""
    found, wanted = (differentiated(fused(deferred, **overrides), batch) for deferred in (True, False))
    assert max(distances(found, wanted)) < 2e-6


@pytest.mark.parametrize("overrides", [{**RMS, "dropout": 0.2}, {**RMS, "norm_gain": False}, LLAMA], ids=str)
def test_fused_rms_norms_are_the_references(batch, overrides):
    model, plain = fused(False, **overrides), GPT(GPTConfig(**TINY | overrides), Ops(), seed=3)
    plain.load_state_dict(model.state_dict())
    with Dispatched() as dispatched:
        found = differentiated(model, batch)
    assert dispatched.ops["residual_norm_backward"] == model.config.num_layers
    assert max(distances(found, differentiated(plain, batch))) < 2e-6


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bf16_is_no_further_from_fp64(batch, dropout):
    exact = GPT(GPTConfig(**TINY | {"dropout": dropout}), Ops(), seed=3)
    exact.load_state_dict(fused(False).state_dict())
    exact.double().compute_dtype = torch.float64
    wanted, errors = differentiated(exact, batch), {}
    for deferred in (False, True):
        model = fused(deferred, dropout=dropout)
        model.compute_dtype = torch.bfloat16
        errors[deferred] = torch.tensor(distances(differentiated(model, batch), wanted))
    assert errors[True].square().mean().sqrt() <= 1.5 * errors[False].square().mean().sqrt()
    assert errors[True].max() <= 1.5 * errors[False].max()


def test_sums_of_the_stream_and_of_bias_gradients_are_passes_less(batch):
    counted, layers = {}, 2
    for deferred in (False, True):
        model = fused(deferred, num_layers=layers, dropout=0.1)
        model.compute_dtype = torch.bfloat16
        with Dispatched() as dispatched:
            model(*batch).backward()
        counted[deferred] = dispatched.ops
    fewer = counted[False] - counted[True]
    # A block's last sum, and that of gradients where the stream branches (not the first block's); its dropout, in both
    # directions; two bias gradients.
    assert (fewer["add"], fewer["dropout"], fewer["sum"]) == (2 * layers - 1, 2 * layers, 2 * layers)
    assert counted[True] - counted[False] == Counter(
        {"residual_norm": layers, "residual_norm_backward": layers, "mm": 2 * layers, "clone": layers}
    )  # for as many layer norms and products with a bias; the bias is copied


def test_two_runs_of_positions_have_their_dropout(batch):
    """A context rank's key with a gap, which the kernel does not know."""

    class Cut:
        sequence = whole = False
        rank, size = 0, 1

        def positions(self, first: int, count: int, length: int) -> tuple[int, int]:
            return first, 6

    losses = []
    for deferred in (True, False):
        model = fused(deferred, dropout=0.2, sequence_length=24)
        for block in model.blocks():
            block.context = Cut()  # of dropout's positions alone, not of attention's
        even = tuple(each[:, :12] if each.dim() == 2 else each for each in batch)
        losses.append(differentiated(model, even))
    assert max(distances(*losses)) < 2e-6


def test_parts_of_a_pipeline_add_up_before_they_send(batch):
    tokens, targets, ids = batch
    whole = fused(True, dropout=0.2, tied_embeddings=False)
    first, last = (fused(True, dropout=0.2, tied_embeddings=False) for _ in range(2))
    first.keep(range(1))
    last.keep(range(1, 2))
    sent = first(tokens, None, ids)
    assert isinstance(sent, Tensor)
    loss = last(sent, targets, ids)
    torch.testing.assert_close(loss, whole(tokens, targets, ids), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_compiled_blocks_give_the_same(batch):
    """Also if an earlier model in the process had another dropout, which Dynamo would turn into a symbol."""
    for p in (0.1, 0.2):
        model, plain = fused(True, dropout=p), fused(False, dropout=p)
        for block in model.blocks():
            compile_block(block, backend="aot_eager", fullgraph=True)
        assert max(distances(differentiated(model, batch), differentiated(plain, batch))) < 2e-6


def test_offloaded_activations_give_the_same_and_recomputed_blocks_add_up_themselves(batch):
    wanted = differentiated(fused(False, dropout=0.2), batch)
    for mode in (ActivationCheckpointing.offload, ActivationCheckpointing.full, ActivationCheckpointing.selective):
        part = planned(fused(True, dropout=0.2), policy("fp32"), mode)
        assert [block.deferred_add for block in part.blocks()] == [mode is ActivationCheckpointing.offload] * 2
        assert max(distances(differentiated(part, batch), wanted)) < 2e-6


@pytest.mark.parametrize(
    "precision", [Precision.bf16, Precision.fp8, Precision.fp16, Precision.amp_o1, Precision.amp_o2]
)
def test_apexs_levels_keep_their_sums(precision):
    model = fused(True)
    set_dtypes(Model.of(model.config), model, policy(precision))
    deferred = precision not in (Precision.amp_o1, Precision.amp_o2)
    assert [block.deferred_add for block in model.blocks()] == [deferred] * 2
