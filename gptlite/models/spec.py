"""ModelSpec: the interface between the engine and a model.

A new model is a configuration dataclass, a module and a subclass of ModelSpec. `build` is required, and `loss` if it is
not the cross entropy of logits. The others have defaults for a plain nn.Module (gptlite.models.plain); if a parallelism
axis needs one that is missing, the configuration is refused before any rank starts. Importing a spec must not import
torch, so that composing a configuration stays fast.

Shapes: B sequences of a micro-batch, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gptlite.errors import ConfigError
from gptlite.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.models.huggingface import Adapter
    from gptlite.models.sampling import Sampling
    from gptlite.ops.inputs import Inputs
    from gptlite.ops.select import Ops
    from gptlite.parallelism.mesh import Mesh
    from gptlite.parallelism.stage_runner import StageRunner
    from gptlite.precision import Policy

C = TypeVar("C", bound=ModelConfig)


class Cut(Enum):
    """Sharding of a layer of gptlite.models.layers over the tensor axis."""

    column = "column"  # each computes some of a linear layer's outputs, or has the gains of its heads
    row = "row"  # each takes some of a linear layer's inputs, and the results are added up
    features = "features"  # each has some columns of an embedding
    vocabulary = "vocabulary"  # each has some rows of an embedding, or of the head over it
    experts = "experts"  # each has some hidden units of every expert, and the results are added up

    @property
    def dims(self) -> dict[str, int]:
        """`{parameter: sharded dim}` of such a layer; other parameters are replicated."""
        if self is Cut.experts:
            return {"up": 1, "down": 2}
        return {"weight": 1} if self in (Cut.row, Cut.features) else {"weight": 0, "bias": 0}


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
    """Matrix structure that Muon needs: `edges`, name suffixes of matrices that AdamW steps (embeddings, the head);
    `fused`, `{name suffix: (groups, relative rows of each matrix in a group)}` of parameters that consist of several
    matrices; `batched`, name suffixes of parameters [number, rows, columns] with a matrix of each expert."""

    edges: tuple[str, ...] = ()
    fused: Mapping[str, tuple[int, tuple[int, ...]]] | None = None
    batched: tuple[str, ...] = ()


class ModelSpec(Generic[C]):
    """Interface of a model for the engine. Methods take the model's configuration, an instance of `schema`.

    `name` is that of its schema in presets: `defaults: [<name>_schema, _self_]`. `casts` is True if its layers compute
    in their input's dtype, whatever their parameters' dtype, as gptlite.models.layers do; other models run under
    autocast.
    """

    name: str
    schema: type[C]
    casts = False
    reads: str = "tokens"  # or "samples": of a dataset that is not text
    keyed_dropout = False  # True if dropout masks are keyed by sample, not drawn from torch's generator
    metrics: tuple[str, ...] = ()  # names of the sums that `loss` records, such as "accuracy"
    writes_text = False  # True if `generate` is implemented
    blocks_key = "blocks"  # the configuration key of the number of blocks
    positive: tuple[str, ...] = ()  # configuration keys that must be at least 1 if they are not null
    renamed: Mapping[str, str] = {}  # {former configuration key: key}, for saved configurations

    # Methods that need only a configuration. No torch in these.

    def check(self, config: C) -> None:
        """Raise ConfigError for a configuration that is invalid by itself."""

    def num_blocks(self, config: C) -> int | None:
        """Return the number of blocks that can be divided into pipeline stages; None: parallelism.pipeline > 1 is
        refused. By default that of an nn.Sequential, which is built on the meta device to count them."""
        from gptlite.models.plain import count_blocks

        return count_blocks(self, config)

    def equal_blocks(self, config: C) -> bool:
        """Return True if all blocks are equal, so that the planner profiles one of them."""
        return True

    def takes_tokens(self, config: C) -> bool:
        """Return True if every part of a pipeline needs the tokens, which only the first one has as x."""
        return False

    def tensor_sizes(self, config: C) -> dict[str, int] | None:
        """Return `{key: size}` of sizes that parallelism.tensor must divide; None: parallelism.tensor > 1 is
        refused."""
        return None

    def max_length(self, config: C) -> int | None:
        """Return the longest sequence that the model takes; None if there is no limit."""
        return None

    def takes_context(self, config: C) -> bool:
        """Return True if attention supports sequences shared among ranks; False: parallelism.context > 1 is refused."""
        return False

    def experts(self, config: C) -> int | None:
        """Return the number of experts of a layer, which parallelism.expert must divide; None: parallelism.expert > 1
        is refused."""
        return None

    def idle_parameters(self, config: C) -> int:
        """Return the number of parameters of the experts that a token does not take."""
        return 0

    def upcycled(self, config: C, experts: int, top_k: int) -> tuple[C, dict[str, str]]:
        """Return the configuration with that many experts, each a copy of the dense MLP, and `{parameter of experts:
        parameter that each copies}`. Raises ConfigError for a model that cannot have them."""
        raise ConfigError(f"the {self.name} model has no experts; a mixture can be made of a GPT")

    def table_rows(self, config: C) -> int | None:
        """Return the number of embedding rows, which the tensor axis shards; None if it is not known yet."""
        return None

    def product_sizes(self, config: C) -> dict[str, int] | None:
        """Return `{key: size}` of the products' dimensions, which must be multiples of 16 for precision=fp8; None: fp8
        is refused."""
        return None

    def norms_have_biases(self, config: C) -> bool:
        """Return True if norms have biases, as Apex's norms do."""
        return False

    def vocab_size(self, config: C) -> int | None:
        """Return the number of token ids of the model, by default its key vocab_size; None: as many as the
        tokenizer."""
        return getattr(config, "vocab_size", None)

    def with_vocabulary(self, config: C, vocab_size: int) -> C:
        """Return the configuration with the tokenizer's number of token ids, unless it already has a number. By default
        that of a key vocab_size."""
        unset = getattr(config, "vocab_size", 0) is None
        return replace(config, vocab_size=vocab_size) if unset else config  # type: ignore[call-arg]

    def flops(self, config: C, length: int) -> tuple[int, int] | None:
        """Return the FLOPs of a token, forward and backward, in one block and in everything after the blocks. None:
        they are counted for MFU (gptlite.models.flops), and a pipeline treats all blocks as equal."""
        return None

    def attention(self, config: C) -> tuple[int, int, bool] | None:
        """Return the number of heads, their width, and True if attention has dropout, for the banner's line on SDPA's
        kernel; None: no such line."""
        return None

    def label(self, config: C) -> str:
        """Return the model's name in banners and tables."""
        return getattr(config, "name", self.name)

    def words(self, config: C) -> str:
        """Return the banner's description, printed after the number of parameters."""
        return ""

    def huggingface(self) -> Sequence[Adapter[C]]:
        """Return the converters to and from classes of Hugging Face's transformers; none: exports are refused."""
        return ()

    # Methods on modules.

    def build(self, config: C, ops: Ops, seed: int) -> nn.Module:
        """Build the whole model on the default device, which is meta in a run. `seed` keys its dropout."""
        raise NotImplementedError(f"{type(self).__name__} has no build")

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        """Return the blocks of a part by their number in the whole model, in forward order. They are the units of
        ZeRO's gathers, of pipeline stages and of activation checkpointing. By default the children of an nn.Sequential,
        or the elements of all outermost nn.ModuleLists."""
        from gptlite.models.plain import blocks_of

        return blocks_of(part)

    def forward(self, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
        """Return the sum of the losses, fp32, in nats, of tokens x int64 [B, S], or of the samples' inputs.

        In a pipeline a part without the beginning is given activations, and one without the end returns activations.
        By default calls the module with x (`**x` for a dict, `*x` for a tuple), and `loss` with its output.
        """
        from gptlite.models.plain import call, has_end

        out = call(part, x)
        return self.loss(out, inputs) if has_end(part) else out

    def loss(self, out: Any, inputs: Inputs) -> Tensor:
        """Return the fp32 sum of the losses of the module's output, by default the cross entropy of logits
        [B, ..., classes].

        If the spec declares `metrics`, `inputs.metrics` is a dict, in which this stores the sum of each over the
        micro-batch, a number or a 0-dim tensor. They are divided by `count`, like the loss. The default stores the
        number of correct predictions as "accuracy".
        """
        from gptlite.models.plain import cross_entropy

        return cross_entropy(self, out, inputs)

    def scores(self, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
        """Return fp32 [B, S, 2] for the targets [B, S]: the log probability of each target, and 1 if no token is more
        likely, else 0; zeros where a target is -100. A part without the end returns activations.

        By default of the module's output, logits [B, S, V]. Raises ConfigError for another output, and if the spec has
        its own `forward`.
        """
        from gptlite.models.plain import scores

        return scores(self, part, x, inputs.targets)

    def count(self, targets: Tensor) -> Tensor | int:
        """Return the number of losses that `forward` sums for these targets; by default of targets other than -100.

        A sample whose target has several numbers but one loss needs its own: `len(targets)`.
        """
        from gptlite.ops.cross_entropy import IGNORE

        return (targets != IGNORE).sum()

    def keep(self, part: nn.Module, config: C, blocks: range) -> None:
        """Reduce the whole model to the part with these blocks: drop other blocks, and the ends of the model that are
        not in it. By default for an nn.Sequential, whose blocks each map a tensor to a tensor."""
        from gptlite.models.plain import keep_blocks

        keep_blocks(part, blocks)

    def activations(self, config: C, batch: int, length: int) -> tuple[int, ...] | None:
        """Return the shape of the activations that one part of a pipeline sends to the next, if it is the same between
        all blocks; None: the blocks are run on the meta device to find the shapes."""
        return None

    def cuts(self, config: C) -> Mapping[str, Cut]:
        """Return `{module name: sharding}` of layers over the tensor axis; `*` matches one component of a name."""
        return {}

    def tied(self, config: C) -> Mapping[str, str]:
        """Return `{copy: owner}` of the names of tied parameters. In a pipeline the first stage holds the owner and the
        last one the copy. By default the parameters that several modules share; a pipeline is refused for these."""
        from gptlite.models.plain import shared_parameters

        return shared_parameters(self, config)

    def initial(self, config: C, name: str, shape: tuple[int, ...]) -> Normal | Constant:
        """Return the initial values of a parameter. The defaults depend on the shape: matrices and filters N(0, 1 /
        fan-in), vectors 1 if they are named `weight` (a norm's gain), else 0."""
        if len(shape) > 1:
            return Normal(1 / math.sqrt(math.prod(shape[1:])))
        return Constant(1.0 if name.endswith("weight") else 0.0)

    def buffers(self, config: C, ops: Ops, seed: int) -> dict[str, Tensor]:
        """Return `{name: initial value}` of the whole model's buffers. By default a model is built on the CPU for
        this."""
        import torch

        with torch.device("cpu"):
            return dict(self.build(config, ops, seed).named_buffers())

    def prepare(self, part: nn.Module, policy: Policy, recomputes: bool) -> None:
        """Set up a part for a precision policy, once. `recomputes`: its blocks are recomputed in the backward pass."""

    def begin_step(self, config: C, parts: Sequence[nn.Module], upstream: Tensor) -> None:
        """Prepare parts for a step. `upstream`: the gradient with respect to a sum of losses, a 0-dim tensor."""

    def end_step(self, config: C, parts: Sequence[nn.Module], mesh: Mesh) -> Tensor | None:
        """Update what depends on the whole step, after its last backward pass. Called on all ranks.

        Returns the loads of a mixture of experts, the same on all ranks: fp64 [layers with experts, E + 1], the tokens
        of each expert and in the last column the router's losses, summed over tokens.
        """

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
        """Yield up to `max_tokens` tokens that continue `prompt`, ending before the first `stop`, if the model
        `writes_text`. `cache`: results for earlier tokens are kept. Called by all ranks of a pipeline."""
        raise NotImplementedError(f"{type(self).__name__} writes no text")

    def matrices(self, config: C) -> Matrices:
        """Return the matrix structure for Muon."""
        return Matrices()


def spec_of(config: Any) -> ModelSpec:
    """Return the spec of a model's configuration. Raises TypeError for a class without one."""
    from gptlite.models.registry import SPECS  # here, since the registry imports this module

    for spec in SPECS:
        if spec.schema is type(config):
            return spec
    raise TypeError(f"{type(config).__name__} is not the configuration of a registered model")
