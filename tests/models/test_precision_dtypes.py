"""docs/precision.md's table, read off the operators that run."""

from collections import defaultdict

import pytest
import torch
from dispatched import Watching
from models.conftest import planned, policy

from gptlite.models import parallelize
from gptlite.ops.config import Attention
from gptlite.precision import Policy

HALF, FULL = {torch.float16}, {torch.float32}
KINDS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "norm": ("native_layer_norm", "native_layer_norm_backward"),
    "gelu": ("gelu", "gelu_backward"),
}


class Seen(Watching):
    """The dtypes of floating-point inputs, by kind of operator."""

    def __init__(self) -> None:
        super().__init__(self.note)
        self.dtypes = defaultdict(set)

    def note(self, func, args, out) -> None:
        for kind in (kind for kind, names in KINDS.items() if func._schema.name.partition("::")[2] in names):
            # Not the fourth and on: statistics that the backward pass is given.
            inputs = args[:2] if kind == "norm" else args
            self.dtypes[kind] |= {a.dtype for a in inputs if isinstance(a, torch.Tensor) and a.is_floating_point()}


def gradients(model, batch) -> dict[str, torch.Tensor]:
    (1000 * model(*batch)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(
    ("name", "norm", "gelu", "stream"),
    [
        ("fp16", HALF, HALF, torch.float16),
        ("amp_o1", FULL, FULL, torch.float32),
        ("amp_o2", FULL, HALF, torch.float16),
    ],
)
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "none"])
def test_what_each_operator_reads(tiny, batch, name, norm, gelu, stream, recompute, bias):
    model, between = planned(tiny(Attention.matmul, dropout=0.1, bias=bias), policy(name), recompute), set()
    for block in model.layers.values():
        block.register_forward_hook(lambda *call: between.add(call[2].dtype))
    with Seen() as seen:
        found = gradients(model, batch)
    assert seen.dtypes == {"matmul": HALF, "norm": norm, "gelu": gelu}
    assert between == {stream}
    assert {p.dtype for p in model.parameters()} | {g.dtype for g in found.values()} == FULL


def test_only_fp16_rounds_the_gains_of_norms(tiny, batch):
    """A gain that fp16 does not have: 1 + 2**-12. Twice it is another output in fp32, and the same one rounded."""
    outputs = {}
    for name in ("fp16", "amp_o1", "amp_o2"):
        outputs[name] = []
        for gain in (1.0, 1.0 + 2.0**-12):
            norm = planned(tiny(), policy(name)).layers["0"].attn_norm
            with torch.no_grad():
                norm.weight.fill_(gain)
                x = torch.linspace(-1, 1, norm.weight.numel()).mul(512).to(policy(name).stream_dtype)
                outputs[name].append(norm(x.unsqueeze(0)))
    assert torch.equal(*outputs["fp16"])
    assert not torch.equal(*outputs["amp_o1"])
    assert not torch.equal(*outputs["amp_o2"])


def test_the_more_is_fp32_the_closer_to_it(tiny, batch):
    exact = gradients(planned(tiny(), policy("fp32")), batch)

    def distance(name: str) -> float:
        found = gradients(planned(tiny(), policy(name)), batch)
        return max(((found[key] - exact[key]).norm() / exact[key].norm()).item() for key in exact)

    o1, o2, fp16, bf16 = map(distance, ("amp_o1", "amp_o2", "fp16", "bf16"))
    assert 0 < o1 < fp16 < bf16 < 0.2
    assert o2 < bf16 / 2


def test_o1_is_what_autocast_does_with_the_same_lists(tiny, batch):
    """torch's own casts over the fp32 model are as far from fp32, and no further from ours."""
    ours = gradients(planned(tiny(Attention.matmul), policy("amp_o1")), batch)
    model = planned(tiny(Attention.matmul), policy("fp32"))
    with torch.autocast("cpu", torch.float16):
        loss = model(*batch)
    (1000 * loss).backward()
    exact = gradients(planned(tiny(Attention.matmul), policy("fp32")), batch)
    for name, p in model.named_parameters():
        apart = (p.grad - exact[name]).norm()
        assert (ours[name] - p.grad).norm() <= 3 * apart + 1e-4 * exact[name].norm(), name
        assert apart > 0


@pytest.mark.parametrize(("master_weights", "kept"), [(True, 0), (False, 1)])
def test_reduced_gradients_stay_in_fp32_where_parameters_are_bf16(tiny, monkeypatch, master_weights, kept):
    parts = []
    monkeypatch.setattr(parallelize, "keep_fp32_gradients", parts.append)
    part = planned(tiny(), Policy(torch.bfloat16, "", master_weights=master_weights))
    assert parts == [part] * kept
