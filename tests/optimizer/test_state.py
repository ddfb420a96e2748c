"""A run continued from saved optimizer state takes the very same steps."""

import pytest
import torch
from torch import Tensor, nn

from gptlite.ops.matrices import Matrices
from gptlite.optimizer import config as classes
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.state import optimizer_state
from gptlite.satellites.optimizers import configs
from gptlite.satellites.plan.optimizers import Shard, state_bytes

CONFIGS = [
    classes.AdamWConfig(lr=0.1),
    classes.AdamConfig(lr=0.1),
    classes.SGDConfig(lr=0.1),
    classes.SGDConfig(lr=0.1, nesterov=True),
    classes.SGDConfig(momentum=0.0),
    configs.LambConfig(),
    configs.LionConfig(),
    classes.MuonConfig(lr=0.1),
    configs.AdafactorConfig(),
]
ADAM_KEYS = ["step", "exp_avg", "exp_avg_sq"]


class Run:
    """A two-layer model and its optimizer; step `n` is the same in every run."""

    def __init__(self, config: classes.OptimizerConfig, width: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        self.optimizer = build_optimizer(config, self.model.named_parameters())

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).square().sum().backward()
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def assert_equal_bits(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_continuing_from_saved_state_is_bitwise_the_same(config):
    unbroken = Run(config)
    unbroken.train(0, 6)

    first = Run(config)
    first.train(0, 3)
    saved = {key: tensor.clone() for key, tensor in optimizer_state(first.optimizer).items()}
    second = Run(config)
    second.model.load_state_dict(first.model.state_dict())
    for key, tensor in optimizer_state(second.optimizer).items():
        tensor.copy_(saved[key])
    second.train(3, 6)
    assert_equal_bits(second.weights(), unbroken.weights())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_materializing_before_the_first_step_changes_nothing(config):
    plain, materialized = Run(config), Run(config)
    optimizer_state(materialized.optimizer)
    plain.train(0, 3)
    materialized.train(0, 3)
    assert_equal_bits(materialized.weights(), plain.weights())


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (classes.AdamWConfig(), ADAM_KEYS),
        (classes.AdamConfig(), ADAM_KEYS),
        (classes.SGDConfig(), ["momentum_buffer"]),
        (configs.LambConfig(), ADAM_KEYS),
        (configs.LionConfig(), ["exp_avg"]),
    ],
)
def test_keys_are_global_names_and_the_same_before_and_after_a_step(config, names):
    run = Run(config)
    before = optimizer_state(run.optimizer)
    assert set(before) == {f"optim.{name}.{key}" for name, _ in run.model.named_parameters() for key in names}
    assert before[f"optim.0.weight.{names[-1]}"].shape == (3, 4)
    layout = {key: (tensor.shape, tensor.dtype) for key, tensor in before.items()}
    run.train(0, 1)
    after = optimizer_state(run.optimizer)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in after.items()} == layout
    assert any(tensor.any() for tensor in after.values())


@pytest.mark.parametrize(
    ("config", "matrix", "vector"),
    [
        (classes.MuonConfig(), {"momentum_buffer": (3, 4)}, {"step": (), "exp_avg": (3,), "exp_avg_sq": (3,)}),
        (configs.AdafactorConfig(), {"step": (), "row_var": (3,), "col_var": (4,)}, {"step": (), "variance": (3,)}),
    ],
)
def test_matrices_and_vectors_may_have_other_states(config, matrix, vector):
    run = Run(config)
    for _ in range(2):
        state = optimizer_state(run.optimizer)
        for name, shapes in (("0.weight", matrix), ("0.bias", vector)):
            prefix = f"optim.{name}."
            found = {k.removeprefix(prefix): tuple(t.shape) for k, t in state.items() if k.startswith(prefix)}
            assert found == shapes
        run.train(0, 1)


def test_state_is_live():
    run = Run(classes.AdamWConfig())
    optimizer_state(run.optimizer)["optim.0.bias.exp_avg"].fill_(7)
    bias = dict(run.model.named_parameters())["0.bias"]
    assert run.optimizer.state[bias]["exp_avg"].tolist() == [7, 7, 7]


def test_foreach_optimizers_count_steps_on_the_host():
    parameter = nn.Parameter(torch.zeros(2, 2, device="meta"))
    state = optimizer_state(build_optimizer(classes.AdamWConfig(), [("weight", parameter)]))
    assert state["optim.weight.step"].device.type == "cpu"
    assert state["optim.weight.exp_avg"].device.type == "meta"


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (5, 1), (1, 5), (2, 3, 4), (2, 1, 4), (2, 3, 4, 5), (0, 4)])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_planners_bytes_of_a_state_are_those_of_the_optimizer(config, shape):
    held = [("layers.0.weight", nn.Parameter(torch.zeros(shape)))]
    state = optimizer_state(build_optimizer(config, held, Matrices(batched=("weight",))))
    assert state_bytes(config, [Shard(shape, True, 1)]) == sum(tensor.nbytes for tensor in state.values())
