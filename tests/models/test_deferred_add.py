"""A block that leaves its last sum and its biases to the next norm, as on a GPU: the same model, and fewer passes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from models.conftest import TINY, randomized
from torch import Tensor

from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.models.parallelize import parallelize, set_dtypes
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.torch_private import compile_block
from gptlite.precision import Policy, Precision

FUSED = Ops(Attention.matmul, layer_norm=True, activation=True, dropout=True)
pytestmark = pytest.mark.usefixtures("kernels")
IDS = torch.tensor([7, 3, 2**33, 0])


def build(deferred: bool, **overrides: Any) -> GPT:
    return randomized(GPT(GPTConfig(**TINY | overrides), replace(FUSED, deferred_add=deferred), seed=3))


def of(model: GPT, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """The loss, and the gradient of every parameter."""
    loss = model(*batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def distance(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))
        for a, b in zip(found, wanted, strict=True)
    ]


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
    found, wanted = (of(build(deferred, **overrides), batch) for deferred in (True, False))
    assert max(distance(found, wanted)) < 2e-6


@pytest.mark.parametrize("overrides", [{**RMS, "dropout": 0.2}, {**RMS, "norm_gain": False}, LLAMA], ids=str)
def test_fused_rms_norms_are_the_references(batch, overrides):
    model, plain = build(False, **overrides), GPT(GPTConfig(**TINY | overrides), Ops(), seed=3)
    plain.load_state_dict(model.state_dict())
    with Dispatched() as dispatched:
        found = of(model, batch)
    assert dispatched.ops["residual_norm_backward"] == model.config.num_layers
    assert max(distance(found, of(plain, batch))) < 2e-6


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bf16_is_no_further_from_fp64(batch, dropout):
    exact = GPT(GPTConfig(**TINY | {"dropout": dropout}), Ops(), seed=3)
    exact.load_state_dict(build(False).state_dict())
    exact.double().compute_dtype = torch.float64
    wanted, errors = of(exact, batch), {}
    for deferred in (False, True):
        model = build(deferred, dropout=dropout)
        model.compute_dtype = torch.bfloat16
        errors[deferred] = torch.tensor(distance(of(model, batch), wanted))
    assert errors[True].square().mean().sqrt() <= 1.5 * errors[False].square().mean().sqrt()
    assert errors[True].max() <= 1.5 * errors[False].max()


def test_sums_of_the_stream_and_of_bias_gradients_are_passes_less(batch):
    counted, layers = {}, 2
    for deferred in (False, True):
        model = build(deferred, num_layers=layers, dropout=0.1)
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
        model = build(deferred, dropout=0.2, sequence_length=24)
        for block in model.blocks():
            block.context = Cut()  # of dropout's positions alone, not of attention's
        even = tuple(each[:, :12] if each.dim() == 2 else each for each in batch)
        losses.append(of(model, even))
    assert max(distance(*losses)) < 2e-6


def test_parts_of_a_pipeline_add_up_before_they_send(batch):
    tokens, targets, ids = batch
    whole = build(True, dropout=0.2, tied_embeddings=False)
    first, last = (build(True, dropout=0.2, tied_embeddings=False) for _ in range(2))
    first.keep(range(1))
    last.keep(range(1, 2))
    sent = first(tokens, None, ids)
    assert isinstance(sent, Tensor)
    loss = last(sent, targets, ids)
    torch.testing.assert_close(loss, whole(tokens, targets, ids), rtol=1e-6, atol=0)


def test_generation_by_caches_is_the_whole_sequence(batch):
    model, plain = build(True).eval(), build(False)
    tokens = batch[0][:, :9]
    with torch.no_grad():
        caches = [LayerCache(9) for _ in model.layers]
        model.logits(tokens[:, :5], caches)
        for place in range(5, 9):
            logits = model.logits(tokens[:, place : place + 1], caches)
        torch.testing.assert_close(logits, plain.logits(tokens), rtol=1e-5, atol=1e-5)


def test_compiled_blocks_give_the_same(batch):
    """Also if an earlier model in the process had another dropout, which Dynamo would turn into a symbol."""
    for p in (0.1, 0.2):
        model, plain = build(True, dropout=p), build(False, dropout=p)
        for block in model.blocks():
            compile_block(block, backend="aot_eager", fullgraph=True)
        assert max(distance(of(model, batch), of(plain, batch))) < 2e-6


def test_offloaded_activations_give_the_same_and_recomputed_blocks_add_up_themselves(batch):
    wanted = of(build(False, dropout=0.2), batch)
    for mode in (ActivationCheckpointing.offload, ActivationCheckpointing.full, ActivationCheckpointing.selective):
        config = ParallelismConfig(activation_checkpointing=mode)
        whole = build(True, dropout=0.2)
        (part,) = parallelize(Model.of(whole.config), whole, Mesh(torch.device("cpu")), config, policy(Precision.fp32))
        assert [block.deferred_add for block in part.blocks()] == [mode is ActivationCheckpointing.offload] * 2
        assert max(distance(of(part, batch), wanted)) < 2e-6


def policy(precision: Precision) -> Policy:
    dtype = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp8: torch.bfloat16}
    return Policy(dtype.get(precision, torch.float16), "", precision)


@pytest.mark.parametrize(
    "precision", [Precision.bf16, Precision.fp8, Precision.fp16, Precision.amp_o1, Precision.amp_o2]
)
def test_apexs_levels_keep_their_sums(precision):
    model = build(True)
    set_dtypes(Model.of(model.config), model, policy(precision))
    deferred = precision not in (Precision.amp_o1, Precision.amp_o2)
    assert [block.deferred_add for block in model.blocks()] == [deferred] * 2
