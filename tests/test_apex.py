"""NVIDIA Apex is found by its files, and driven as its documentation says. It needs a GPU, so here it is a stand-in."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gptlite.config import load
from gptlite.config.checks import check_device
from gptlite.errors import ConfigError
from gptlite.models import layers
from gptlite.ops import apex
from gptlite.ops.config import LayerNormKernel, OpsConfig
from gptlite.ops.layer_norm import NormParameters, layer_norm, residual_norm
from gptlite.ops.select import select_ops
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import AdamWConfig, OptimizerConfig
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.boxes import local_tensor
from gptlite.satellites.optimizers.configs import ApexAdamConfig, ApexLambConfig, LambConfig
from gptlite.torch_private.simulation import imagined_world

Install = Callable[..., Path]
# As apex/optimizers/fused_adam.py and fused_lamb.py are called, with the state that they keep, and steps taken by torch
# and by ours; tensors that are no plain ones are refused, as the extension does.
OPTIMIZERS = """
import torch

class _Fused(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True, max_grad_norm=1.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode, self.max_grad_norm, self.calls = adam_w_mode, max_grad_norm, []

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                assert type(p) is torch.Tensor and type(p.grad) is torch.Tensor, (type(p), type(p.grad))
                self.calls.append((tuple(p.shape), group["step"], group["lr"], group["weight_decay"]))
                self.one(group, p, self.state[p])

    def moments(self, group, p, state):
        b1, b2 = group["betas"]
        state["exp_avg"].lerp_(p.grad, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        first, second = state["exp_avg"] / (1 - b1 ** group["step"]), state["exp_avg_sq"] / (1 - b2 ** group["step"])
        return first / (second.sqrt() + group["eps"])

class FusedAdam(_Fused):
    def one(self, group, p, state):
        assert self.adam_w_mode
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * self.moments(group, p, state))

class FusedLAMB(_Fused):
    def one(self, group, p, state):
        assert p.grad.norm() < self.max_grad_norm  # else it clips
        update = self.moments(group, p, state) + group["weight_decay"] * p
        p.sub_(group["lr"] * (p.norm() / update.norm() if group["weight_decay"] else 1.0) * update)
"""
LAYER_NORM = """
import torch
calls = []
def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    calls.append(tuple(normalized_shape))
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package on sys.path: `none`, `pypi`, `python_only` or `complete`."""

    def put(kind: str) -> Path:
        files = {
            "none": {},
            "pypi": {"apex/__init__.py": "raise RuntimeError('imported')", "apex/lib/__init__.py": ""},
            "python_only": {"apex/__init__.py": "raise RuntimeError('imported')", "apex/optimizers/fused_adam.py": ""},
            "complete": {
                "apex/__init__.py": "",
                "apex/optimizers/__init__.py": OPTIMIZERS,
                "apex/optimizers/fused_adam.py": "",
                "apex/normalization/__init__.py": "",
                "apex/normalization/fused_layer_norm.py": LAYER_NORM,
                "amp_C.py": "",
                "fused_layer_norm_cuda.py": "",
            },
        }[kind]
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path / "apex"

    before = set(sys.modules)
    yield put
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("apex", "amp_C"):
            del sys.modules[name]


REASONS = {
    "none": "Apex is not installed; build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . in",
    "pypi": "is not NVIDIA's: PyPI's apex is another project; uninstall it, and build it with",
    "python_only": "is a Python-only build, without {extension}; build it with",
}


@pytest.mark.parametrize(
    ("override", "extension", "instead"),
    [
        ("optimizer=apex_adam", "amp_C", "optimizer=adamw"),
        ("optimizer=apex_lamb", "amp_C", "optimizer=lamb"),
        ("ops.layer_norm=apex", "fused_layer_norm_cuda", "ops.layer_norm=auto"),
    ],
)
@pytest.mark.parametrize("kind", REASONS)
def test_what_is_wrong_with_it_is_one_line(install: Install, kind, override, extension, instead):
    install(kind)
    with pytest.raises(ConfigError) as error:
        load([override, "model=gpt-lite"])
    line = str(error.value)
    assert line.startswith(f"{override}: ")
    assert REASONS[kind].format(extension=extension) in line
    assert line.endswith(f", or use {instead}")
    assert "\n" not in line
    assert "apex" not in sys.modules


def test_a_whole_one_is_taken_but_not_on_a_cpu(install: Install):
    install("complete")
    assert apex.why_not(apex.OPTIMIZERS) == apex.why_not(apex.LAYER_NORM) == ""
    for name, instead in (("apex_adam", "adamw"), ("apex_lamb", "lamb")):
        config = load([f"optimizer={name}"])
        check_device(config, "cuda")
        with pytest.raises(ConfigError, match=rf"^optimizer={name} needs a GPU, but this runs on cpu; .*={instead}$"):
            check_device(config, "cpu")
    config = load(["ops.layer_norm=apex", "model=gpt-lite"])
    with pytest.raises(ConfigError, match=r"^ops.layer_norm=apex needs a GPU, but this runs on cpu; use .*=auto$"):
        select_ops(config.ops, torch.device("cpu"))
    assert "apex" not in sys.modules


WHOLE = r"^optimizer=apex_lamb needs the norms of whole parameters, .*; use optimizer=lamb$"
HOST = r"^optimizer=apex_adam steps on a GPU, but parallelism.offload=cpu keeps its"
UNFIT = {
    **{
        f"optimizer=apex_lamb {each}": WHOLE
        for each in ("parallelism.tensor=2", "parallelism.zero=1", "parallelism=zero3")
    },
    "optimizer=apex_adam parallelism.offload=cpu": HOST,
    "optimizer=apex_adam parallelism.offload=nvme parallelism.offload_path=x": "optimizer=apex_adam does not allow",
    "ops.layer_norm=apex model.bias=false": r"^ops.layer_norm=apex always has biases, but the norms of this model",
}


@pytest.mark.parametrize("words", UNFIT)
def test_what_does_not_go_with_it_is_refused(install: Install, words):
    install("complete")
    with pytest.raises(ConfigError, match=UNFIT[words]):
        load(words.split())
    load(["optimizer=apex_adam", *(each for each in words.split()[1:] if "zero" in each or "tensor" in each)])


def run(config: OptimizerConfig) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.optim.Optimizer]:
    """Three steps at falling rates of a matrix and a vector."""
    torch.manual_seed(0)
    parameters = {"matrix": nn.Parameter(torch.randn(4, 3)), "vector": nn.Parameter(torch.randn(3))}
    optimizer = build_optimizer(config, parameters.items())
    optimizer_state(optimizer)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = config.lr / (1 + step)
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter) * 5
        optimizer.step()
    return [p.detach() for p in parameters.values()], optimizer_state(optimizer), optimizer


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (ApexAdamConfig(lr=0.1, weight_decay=0.3), AdamWConfig(lr=0.1, weight_decay=0.3)),
        (ApexLambConfig(lr=0.1, weight_decay=0.3), LambConfig(lr=0.1, weight_decay=0.3)),
    ],
)
def test_its_steps_and_state_are_those_of_the_same_optimizer_here(install: Install, config, same):
    install("complete")
    weights, state, optimizer = run(config)
    expected, expected_state, _ = run(same)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(state, expected_state, rtol=1e-6, atol=1e-6)
    steps = [call for step in (1, 2, 3) for call in (((4, 3), step, 0.1 / step, 0.3), ((3,), step, 0.1 / step, 0.0))]
    assert optimizer.inner.calls == steps  # type: ignore[attr-defined]


def test_it_gets_local_tensors(install: Install):
    install("complete")
    with imagined_world(1, 2):
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        local, gradient = torch.randn(2, 3), torch.randn(2, 3)
        parameter = nn.Parameter(DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False))
        plain = nn.Parameter(local.clone())
        for each, grad in (
            (parameter, DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False)),
            (plain, gradient),
        ):
            kind = ApexAdamConfig() if each is parameter else AdamWConfig()
            optimizer = build_optimizer(kind, [("a", each)])
            for _ in range(2):
                each.grad = grad
                optimizer.step()
        state = optimizer_state(build_optimizer(ApexAdamConfig(), [("a", parameter)]))
        assert state["optim.a.exp_avg"].shape == (4, 3)
        torch.testing.assert_close(local_tensor(parameter.detach()), plain.detach(), rtol=0, atol=1e-6)


def test_its_layer_norm_is_called_for_norms_alone_and_after_residuals(install: Install):
    install("complete")
    x, y, weight, bias = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(4), torch.randn(4)
    assert torch.equal(layer_norm(x, weight, bias, 1e-5, apex=True), layer_norm(x, weight, bias, 1e-5))
    norm = layers.LayerNorm(4, 1e-5, bias=True, fused=False, apex=True)
    expected = residual_norm(x, y, NormParameters(norm.weight, norm.bias, 1e-5))
    assert all(map(torch.equal, norm.after_residual(x, y, 0.0, None), expected))
    assert sys.modules["apex.normalization.fused_layer_norm"].calls == [(4,), (4,)]


def test_on_a_gpu_it_is_the_models_layer_norm(install: Install, monkeypatch: pytest.MonkeyPatch):
    """Told of a GPU; the modules' calls are seen on the CPU."""
    install("complete")
    ops = select_ops(OpsConfig(layer_norm=LayerNormKernel.apex), torch.device("cuda"))
    assert (ops.apex_norm, ops.layer_norm) == (True, False)
    assert "layer_norm apex (asked for)" in ops.reasons

    from gptlite.models.gpt.config import GPTConfig
    from gptlite.models.gpt.model import GPT
    from gptlite.ops.select import Ops

    torch.manual_seed(0)
    shape = GPTConfig(num_layers=2, num_heads=2, d_model=4, vocab_size=7, sequence_length=5)
    plain = GPT(shape)
    model = GPT(shape, Ops(apex_norm=True))
    model.load_state_dict(plain.state_dict())
    tokens = torch.arange(5)[None]
    assert torch.equal(model(tokens, tokens), plain(tokens, tokens))
    assert len(sys.modules["apex.normalization.fused_layer_norm"].calls) == 2 * 2 + 1
