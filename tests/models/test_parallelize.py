"""The GPT's plan on one device: meta build, recomputation, compilation and the compute dtype change no result."""

import math
from dataclasses import replace

import pytest
import torch
from marking import combinations, marked
from models.conftest import CPU, planned
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gptlite.errors import ConfigError
from gptlite.models.base import Constant
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.init import init_weights
from gptlite.models.model import Model
from gptlite.models.parallelize import materialize, parallelize
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy
from gptlite.satellites.activations import offload
from gptlite.satellites.activations.offload import ActivationOffload

FP32, BF16 = Policy(torch.float32, "test"), Policy(torch.bfloat16, "test")
NONE, FULL, SELECTIVE, OFFLOAD = ActivationCheckpointing
assert [mode.value for mode in (NONE, FULL, SELECTIVE, OFFLOAD)] == ["none", "full", "selective", "offload"]


def plan(model, recompute=NONE, policy=FP32, compile=False):
    return planned(model, policy, recompute, compile)


def step(model, batch):
    loss = model(*batch)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("choice", [Attention.matmul, Attention.sdpa], ids=lambda choice: choice.value)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("recompute", [FULL, SELECTIVE, OFFLOAD], ids=lambda mode: mode.value)
def test_recomputation_changes_no_bit(tiny, batch, recompute, dropout, choice):
    want = step(plan(tiny(choice, dropout=dropout)), batch)
    model = plan(tiny(choice, dropout=dropout), recompute)
    got = step(model, batch)
    assert got.keys() == want.keys()  # names too: checkpoints do not depend on the mode
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(("recompute", "calls"), [(NONE, 1), (FULL, 2), (SELECTIVE, 2), (OFFLOAD, 1)], ids=str)
def test_how_often_a_block_runs(tiny, batch, recompute, calls):
    model, seen = plan(tiny(), recompute), []
    for block in model.layers.values():
        block.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    step(model, batch)
    assert len(seen) == calls * len(model.layers)


def test_a_block_s_backward_pass_fetches_for_the_block_before_it_in_its_micro_batch():
    offloads, blocks = ActivationOffload(), [nn.Identity() for _ in range(3)]
    for block in blocks:
        offloads.wrap(block, first=block is blocks[0])
    before = []
    for block in blocks * 2:  # two micro-batches
        block(torch.ones(1))
        before.append((offloads._last, offloads._last.before))
    saved = [each for each, _ in before]
    assert [link for _, link in before] == [None, saved[0], saved[1], None, saved[3], saved[4]]


def test_offload_moves_what_blocks_save_but_no_parameter(tiny, batch, monkeypatch):
    moved = []
    to_host = ActivationOffload._to_host
    monkeypatch.setattr(ActivationOffload, "_to_host", lambda self, t: moved.append(t.clone()) or to_host(self, t))
    monkeypatch.setattr(offload, "SMALLEST", 0)
    model = plan(tiny(Attention.matmul), OFFLOAD)
    (out,) = (block(torch.randn(2, 8, model.config.d_model)) for block in model.blocks()[:1])
    shapes = {tuple(tensor.shape) for tensor in moved}
    assert (2, 8, model.config.d_model) in shapes
    assert (2, 8, model.config.ffn_size) in shapes
    parameters = {tuple(each.shape) for each in model.blocks()[0].parameters() if each.ndim == 2}
    assert not shapes & (parameters | {shape[::-1] for shape in parameters})
    before, moved[:] = out.sum(), []
    before.backward()
    assert not moved  # the backward pass brings back, it moves nothing


def test_selective_recomputes_no_linear_layer(tiny, batch):
    def flops(recompute):
        model = plan(tiny(), recompute)
        with FlopCounterMode(display=False) as counter:
            step(model, batch)
        return counter.get_total_flops()

    tokens, length = batch[0].numel(), batch[0].shape[1]
    scores_and_values = 2 * 2 * tokens * length * 24 * 2  # two matmuls of 2·S·d FLOPs a token, two layers
    assert flops(SELECTIVE) - flops(NONE) == scores_and_values
    assert flops(FULL) - flops(NONE) > 2 * scores_and_values


def test_recomputation_holds_less_memory(tiny, batch):
    """Bytes autograd keeps between the passes."""

    def kept(recompute):
        model, storages = plan(tiny(dropout=0.3), recompute), {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*batch)
        loss.backward()
        return sum(storages.values())

    assert kept(FULL) < 0.5 * kept(NONE)


def test_recomputation_leaves_generation_alone(tiny, batch):
    with torch.inference_mode():
        assert torch.equal(plan(tiny(), FULL)(batch[0], None), tiny()(batch[0], None))


@pytest.mark.parametrize("recompute", [NONE, FULL, SELECTIVE], ids=lambda mode: mode.value)
def test_bf16_compute_keeps_fp32_parameters_and_gradients(tiny, batch, recompute):
    want = step(plan(tiny()), batch)
    model = plan(tiny(), recompute, BF16)
    assert model.hidden(batch[0], None).dtype == torch.bfloat16
    got = step(model, batch)
    assert got["loss"].dtype == torch.float32
    assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=5e-3)
    assert not torch.equal(got["loss"], want["loss"])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == got[name].dtype == torch.float32
        distance = (got[name] - want[name]).norm() / want[name].norm()
        assert distance < 0.05, f"{name}: {distance:.1e}"


def test_building_on_meta_allocates_nothing():
    """GPT-3 175B is built in well under a second; its parameters would be 700 GB."""
    config = GPTConfig(num_layers=96, num_heads=96, d_model=12288, vocab_size=50257, sequence_length=2048)
    with torch.device("meta"):
        model = GPT(config)
    (part,) = parallelize(Model.of(model.config), model, Mesh(CPU), ParallelismConfig(), FP32)
    tensors = [*part.parameters(), *part.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert sum(each.numel() for each in part.parameters()) == pytest.approx(175e9, rel=5e-3)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_materialized_is_as_built_directly(batch, tied):
    """A tied head stays tied: leaving the meta device makes new parameters."""
    config = GPTConfig(
        num_layers=2, num_heads=2, d_model=16, vocab_size=53, sequence_length=16, tied_embeddings=tied, dropout=0.1
    )
    direct = GPT(config)
    with torch.device("meta"):
        model = GPT(config)
    parts = parallelize(Model.of(model.config), model, Mesh(CPU), ParallelismConfig(), FP32)
    materialize(Model.of(model.config), parts, CPU)
    assert (model.head.weight is model.token_embedding.weight) is tied
    for built in (direct, model):
        init_weights(Model.of(config), built, 0)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in direct.named_parameters()]
    want, got = step(direct, batch), step(model, batch)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    assert float(got["loss"]) == pytest.approx(float((batch[1] >= 0).sum()) * math.log(53), rel=0.01)


@pytest.mark.parametrize("recompute", marked([NONE, FULL, SELECTIVE], quick=1, slow=2, name=lambda mode: mode.value))
def test_all_layers_share_one_compiled_graph(tiny, batch, monkeypatch, recompute):
    """With a graph a layer, layers beyond torch's limit of 8 graphs would run uncompiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend=backend))
    torch.compiler.reset()
    shape = {"num_layers": 3, "dropout": 0.3}
    model = plan(tiny(**shape), recompute, compile=True)
    want, got = step(plan(tiny(**shape), recompute), batch), step(model, batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    step(model, (*batch[:2], batch[2] + 4))  # another step's samples
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("recompute", "policy"),
    marked(
        combinations((NONE, FULL, SELECTIVE), (FP32, BF16), first=[(NONE, BF16), (FULL, FP32)]),
        slow=2,
        name=lambda case: f"{case[0].value}-{case[1].name}",
    ),
)
def test_compiled_gives_the_same_step(tiny, batch, recompute, policy):
    torch.compiler.reset()
    tolerance = 1e-5 if policy is FP32 else 0.05
    want = step(plan(tiny(dropout=0.2), recompute, policy), batch)
    got = step(plan(tiny(dropout=0.2), recompute, policy, compile=True), batch)
    for name, value in want.items():
        error = (got[name] - value).norm() / value.norm()
        assert error < tolerance, f"{name}: {error:.1e}"


def test_stages_are_balanced_by_the_flops_of_the_longest_sequences():
    """Over 4096 tokens a block's attention costs as much as the head; over one, the head costs as much as 5 blocks."""
    config = GPTConfig(num_layers=8, num_heads=2, d_model=64, vocab_size=4096, sequence_length=4096)
    assert Model.of(config).stage_blocks(2) == [range(4), range(4, 8)]
    assert Model.of(replace(config, sequence_length=1)).stage_blocks(2) == [range(7), range(7, 8)]


class Normed(GPTSpec):
    """A GPT whose blocks have batch norms."""

    def build(self, config, ops, seed):
        whole = super().build(config, ops, seed)
        whole.extra = nn.BatchNorm1d(4)
        return whole


def test_batch_norms_of_a_model_that_does_not_sync_them_are_refused():
    """Each rank would average over its own samples alone."""
    model = Model(Normed(), GPTConfig(num_layers=1, num_heads=2, d_model=8, vocab_size=16, sequence_length=4))
    with pytest.raises(ConfigError, match="batch norms; let its spec extend ModelSpec as well"):
        parallelize(model, model.build(Ops(), 0), Mesh(CPU), ParallelismConfig(), FP32)


def test_a_vector_that_the_spec_does_not_know_has_no_initial_value():
    config = GPTConfig()
    assert Normed().initial(config, "final_norm.weight", (8,)) == Constant(1.0)
    with pytest.raises(ConfigError, match=r"layers.0.alpha \[\] has no initial values; define `initial` in Normed"):
        Normed().initial(config, "layers.0.alpha", ())
