"""ModelSpec: everything that the engine may know about a model.

A model of one's own is a configuration dataclass, a module and a subclass of ModelSpec. Three methods are required:
`build`, `blocks` and `forward`. The others have defaults that are right for a plain nn.Module, and an axis that needs
one which is missing is refused by name before any rank starts. Importing a spec must not import torch: composing a
configuration stays fast.

Shapes: B sequences of a micro-batch, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gptlite.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.models.huggingface import Adapter
    from gptlite.models.micro_batch import MicroBatch
    from gptlite.models.sampling import Sampling
    from gptlite.ops.inputs import Inputs
    from gptlite.ops.select import Ops
    from gptlite.parallelism.stage_runner import StageRunner
    from gptlite.precision import Policy

C = TypeVar("C", bound=ModelConfig)


class Cut(Enum):
    """How the ranks of the tensor axis share a layer of gptlite.models.layers."""

    column = "column"  # each computes some of a linear layer's outputs
    row = "row"  # each takes some of a linear layer's inputs, and the results are added up
    vocabulary = "vocabulary"  # each has some rows of an embedding, or of the head over it

    @property
    def dims(self) -> dict[str, int]:
        """The parameters of such a layer that are cut, and along which dim; its others are whole on each rank."""
        return {"weight": 1} if self is Cut.row else {"weight": 0, "bias": 0}


@dataclass(frozen=True)
class Normal:
    """Initial values from N(0, std), drawn from (seed, global name, global offset), the same on any layout."""

    std: float


@dataclass(frozen=True)
class Constant:
    """One initial value for all elements."""

    value: float


@dataclass(frozen=True)
class Matrices:
    """What Muon has to know: `edges`, ends of the names of matrices that AdamW steps (embeddings, the head), and
    `fused`, by the end of a name, how many groups of how many matrices stand in one."""

    edges: tuple[str, ...] = ()
    fused: Mapping[str, tuple[int, int]] | None = None


class ModelSpec(Generic[C]):
    """A model, as the engine sees it. Methods take its own configuration, an instance of `schema`.

    `name` is that of its schema in presets: `defaults: [<name>_schema, _self_]`. `casts` says that its layers compute
    in their input's dtype, whatever their parameters', as gptlite.models.layers do; other models run under autocast.
    """

    name: str
    schema: type[C]
    casts = False
    writes_text = False  # whether there is a `generate`
    blocks_key = "blocks"  # the key of its configuration that says how many blocks there are
    positive: tuple[str, ...] = ()  # keys of its configuration that are at least 1, where they are not null

    # What is known of a configuration alone. No torch in these.

    def check(self, config: C) -> None:
        """Raises ConfigError where the configuration cannot work by itself."""

    def num_blocks(self, config: C) -> int | None:
        """How many blocks there are to cut into pipeline stages; None: parallelism.pipeline > 1 is refused."""
        return None

    def tensor_sizes(self, config: C) -> dict[str, int] | None:
        """The sizes, by key, that parallelism.tensor must divide; None: parallelism.tensor > 1 is refused."""
        return None

    def max_length(self, config: C) -> int | None:
        """The longest sequence that the model takes, if there is one."""
        return None

    def takes_context(self, config: C) -> bool:
        """Whether its attention can share a sequence among ranks; False: parallelism.context > 1 is refused."""
        return False

    def table_rows(self, config: C) -> int | None:
        """Rows of the tables that the tensor axis shares by their rows; None where they are not known yet."""
        return None

    def product_sizes(self, config: C) -> dict[str, int] | None:
        """The sizes, by key, of its products' sides, which precision=fp8 needs to be multiples of 16; None: refused."""
        return None

    def norms_have_biases(self, config: C) -> bool:
        """Whether its norms can be Apex's, which have biases."""
        return False

    def vocab_size(self, config: C) -> int | None:
        """How many token ids the model has; None: as many as the tokenizer."""
        return None

    def with_vocabulary(self, config: C, vocab_size: int) -> C:
        """The configuration with the tokenizer's number of token ids, where it leaves that open."""
        return config

    def flops(self, config: C, length: int) -> tuple[int, int] | None:
        """FLOPs of a token, forward and backward, in one block and in all that follows the blocks. None: MFU counts
        them (gptlite.models.flops), and all blocks weigh the same in a pipeline."""
        return None

    def activation_bytes(
        self, config: C, batch: MicroBatch, recompute: str, blocks: int, last: bool
    ) -> tuple[int, int] | None:
        """An estimate for the banner, in bytes: what so many blocks keep of a micro-batch for the backward pass, and
        the most that comes and goes beside, with the end of the model in the `last` part; None: no estimate.
        `recompute`: none, full, selective or offload."""
        return None

    def attention(self, config: C) -> tuple[int, int, bool] | None:
        """Heads, their width, and whether attention drops out, for the banner's line on the kernel that SDPA takes;
        None: no such line."""
        return None

    def label(self, config: C) -> str:
        """The model's name in banners and tables."""
        return getattr(config, "name", self.name)

    def words(self, config: C) -> str:
        """The banner's description, after the number of parameters."""
        return ""

    def huggingface(self) -> Adapter[C] | None:
        """Its form in Hugging Face's transformers; None: an export is refused."""
        return None

    # What is known of its modules.

    def build(self, config: C, ops: Ops, seed: int) -> nn.Module:
        """The whole model, on the default device, which is meta in a run. `seed` keys its dropout."""
        raise NotImplementedError(f"{type(self).__name__} has no build")

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        """The blocks that a part holds by their number in the whole, in forward order: what ZeRO gathers, a pipeline
        deals out, and activation checkpointing computes again."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks")

    def forward(self, part: nn.Module, x: Tensor, inputs: Inputs) -> Tensor:
        """The sum of the token losses, fp32, in nats, of tokens x int64 [B, S].

        In a pipeline a part without the beginning is given activations, and one without the end returns activations.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def count(self, targets: Tensor) -> Tensor:
        """How many losses `forward` adds up for these targets; by default of those that are not -100."""
        from gptlite.ops.cross_entropy import IGNORE

        return (targets != IGNORE).sum()

    def keep(self, part: nn.Module, config: C, blocks: range) -> None:
        """Makes the whole model the part with these blocks: drops all others, and the ends that are not theirs."""
        raise NotImplementedError(f"{type(self).__name__} cannot be cut into parts of a pipeline")

    def activations(self, config: C, batch: int, length: int) -> tuple[int, ...]:
        """The shape of what one part of a pipeline gives to the next."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its parts exchange")

    def cuts(self, config: C) -> Mapping[str, Cut]:
        """How layers are shared over the tensor axis, by module name; `*` stands for one component of a name."""
        return {}

    def tied(self, config: C) -> Mapping[str, str]:
        """Parameters that are one: the name of the copy, at the end of the model, to the name at its beginning."""
        return {}

    def initial(self, config: C, name: str, shape: tuple[int, ...]) -> Normal | Constant:
        """The initial values of a parameter. By default by shape: matrices and filters from N(0, 1 / fan-in), vectors 1
        where they are named `weight` (a norm's gain), else 0."""
        if len(shape) > 1:
            return Normal(1 / math.sqrt(math.prod(shape[1:])))
        return Constant(1.0 if name.endswith("weight") else 0.0)

    def buffers(self, config: C, ops: Ops, seed: int) -> dict[str, Tensor]:
        """The initial values of the whole model's buffers, by name. By default of one that is built for them."""
        import torch

        with torch.device("cpu"):
            return dict(self.build(config, ops, seed).named_buffers())

    def prepare(self, part: nn.Module, policy: Policy, recomputes: bool) -> None:
        """Tells modules what is known once: the dtypes, and whether blocks are computed again in the backward pass."""

    def generate(
        self,
        runner: StageRunner,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        stop: int | None,
        cache: bool,
    ) -> Iterator[int]:
        """Up to `max_tokens` tokens that continue `prompt`, which end before the first `stop`, where the model
        `writes_text`. `cache`: what was computed of earlier tokens is kept. Called by all ranks of a chain."""
        raise NotImplementedError(f"{type(self).__name__} writes no text")

    def matrices(self, config: C) -> Matrices:
        """What Muon has to know."""
        return Matrices()


def spec_of(config: Any) -> ModelSpec:
    """The spec of a model's configuration. Raises TypeError for a class without one."""
    from gptlite.models.registry import SPECS

    for spec in SPECS:
        if spec.schema is type(config):
            return spec
    raise TypeError(f"{type(config).__name__} is no configuration of a model that is registered")
