"""Optimizers and learning-rate schedules. One dataclass each: builders match on the class."""

from dataclasses import dataclass
from enum import Enum


@dataclass
class OptimizerConfig:
    """What every optimizer has. Weight decay skips biases and norms; `clip_norm: 0` turns clipping off."""

    lr: float = 6e-4
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass
class AdamConfig(OptimizerConfig):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980); weight decay is the L2 penalty."""

    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with (Nesterov) momentum."""

    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False


@dataclass
class LambConfig(OptimizerConfig):
    """Adam's update as long as the matrix it is for, times the rate (You et al. 2019, arXiv:1904.00962)."""

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6


@dataclass
class ApexAdamConfig(AdamWConfig):
    """AdamW by NVIDIA Apex's FusedAdam."""


@dataclass
class ApexLambConfig(LambConfig):
    """LAMB by NVIDIA Apex's FusedLAMB, whose norms are of what a rank holds."""


@dataclass
class LionConfig(OptimizerConfig):
    """The sign of a momentum (Chen et al. 2023, arXiv:2302.06675)."""

    lr: float = 1e-4
    weight_decay: float = 1.0
    beta1: float = 0.95
    beta2: float = 0.98


# Rules that update each element by its own gradient and state alone, so that any piece of a parameter can be stepped.
ELEMENTWISE: tuple[type[OptimizerConfig], ...] = (AdamWConfig, AdamConfig, SGDConfig, LionConfig)


BLOCK_8BIT = 256  # elements that share a scale
LEAST_8BIT = 4096  # with fewer elements a tensor's moments are fp32


def in_8_bits(elements: int) -> bool:
    """Whether the moments of a local tensor of so many elements are in 8 bits: torchao's rule."""
    return elements >= LEAST_8BIT and elements % BLOCK_8BIT == 0


@dataclass
class AdamW8bitConfig(OptimizerConfig):
    """AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), by torchao."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


class MuonScale(Enum):
    """How large an update is: of the RMS of AdamW's, or as Jordan has it, for rates about 0.02."""

    match_rms_adamw = "match_rms_adamw"
    original = "original"


class MuonDtype(Enum):
    """What Newton-Schulz computes in; bf16 is faster on GPUs."""

    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class MuonConfig(OptimizerConfig):
    """Orthogonal momentum for the matrices inside layers (Jordan et al. 2024), AdamW for all else."""

    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    newton_schulz_dtype: MuonDtype = MuonDtype.fp32
    scale: MuonScale = MuonScale.match_rms_adamw
    adamw_lr_ratio: float = 1.0  # AdamW's rate as a fraction of `lr`
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Second moments by row and column (Shazeer and Stern 2018, arXiv:1804.04235); `lr` is relative to the weights."""

    lr: float = 1e-2
    weight_decay: float = 0.0
    decay: float = 0.8  # beta2 of step t is 1 - t^-decay
    clip_threshold: float = 1.0  # on the RMS of each update
    eps1: float = 1e-30  # added to squared gradients
    eps2: float = 1e-3  # the least RMS a parameter is taken to have


@dataclass
class ScheduleConfig:
    """Linear warmup over `warmup_steps`, then a shape. Rates are fractions of `optimizer.lr`."""

    warmup_steps: int | None = 0  # null: a tenth of trainer.max_steps, at most 100


@dataclass
class ConstantConfig(ScheduleConfig):
    """Warmup, then the peak rate."""


@dataclass
class CosineConfig(ScheduleConfig):
    """Half a cosine from the peak to `min_ratio` of it (arXiv:1608.03983, without restarts)."""

    min_ratio: float = 0.1
    decay_steps: int | None = None  # the step where min_ratio is reached; null: trainer.max_steps


@dataclass
class LinearConfig(ScheduleConfig):
    """A straight line from the peak to `min_ratio` of it."""

    min_ratio: float = 0.0
    decay_steps: int | None = None  # null: trainer.max_steps


@dataclass
class WSDConfig(ScheduleConfig):
    """Warmup-stable-decay (MiniCPM, arXiv:2404.06395): the peak rate, then a linear end of `decay_fraction`."""

    min_ratio: float = 0.0
    decay_fraction: float = 0.2
    decay_steps: int | None = None  # the last step of the decay; null: trainer.max_steps


@dataclass
class InverseSqrtConfig(ScheduleConfig):
    """Falls as 1/sqrt(step) from the end of the warmup (Vaswani et al. 2017, arXiv:1706.03762, section 5.3)."""


@dataclass
class WarmupConfig(ScheduleConfig):
    """DeepSpeed's WarmupLR: from `min_ratio` up to the peak along a log (or linear) curve, then constant."""

    min_ratio: float = 0.0
    log: bool = True
