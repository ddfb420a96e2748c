"""Facts about a model that configuration checks, the banner and reports ask for. Each has a default.

A fact that is None is unknown, or means that the model does not support what needs it: such a configuration is refused
before any rank starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from gptlite.models.config import ModelConfig

C = TypeVar("C", bound=ModelConfig)


class Limits(Generic[C]):
    """Sizes that limit the layouts, sequences, precisions and vocabularies of a model."""

    def tensor_sizes(self, config: C) -> dict[str, int] | None:
        """Return `{key: size}` of the sizes that parallelism.tensor must divide; if None, parallelism.tensor > 1 is
        refused."""
        return None

    def max_length(self, config: C) -> int | None:
        """Return the maximum sequence length; None if there is no limit."""
        return None

    def takes_context(self, config: C) -> bool:
        """Return True if attention supports sequences sharded over ranks; if False, parallelism.context > 1 is
        refused."""
        return False

    def experts(self, config: C) -> int | None:
        """Return the number of experts per layer, which parallelism.expert must divide; if None, parallelism.expert > 1
        is refused."""
        return None

    def product_sizes(self, config: C) -> dict[str, int] | None:
        """Return `{key: size}` of the GEMM dimensions, which must be multiples of 16 for precision=fp8; if None, fp8 is
        refused."""
        return None

    def table_rows(self, config: C) -> int | None:
        """Return the number of embedding rows, which the tensor axis shards; None while it is unknown."""
        return None

    def head_sizes(self, config: C) -> dict[str, int] | None:
        """Return `product_sizes` of the output head alone; if None, precision.fp8_head is refused."""
        return None

    def vocab_size(self, config: C) -> int | None:
        """Return the vocabulary size, by default the configuration key `vocab_size`; if None, the model uses the
        tokenizer's."""
        return getattr(config, "vocab_size", None)

    def with_vocabulary(self, config: C, vocab_size: int) -> C:
        """Return the configuration with the tokenizer's vocabulary size, unless it already has one. By default, sets
        the key `vocab_size` if it is null."""
        unset = getattr(config, "vocab_size", 0) is None
        return replace(config, vocab_size=vocab_size) if unset else config  # type: ignore[call-arg]


class Description(Generic[C]):
    """Description of a model, for the banner, MFU and reports. `casts` and `name` are attributes of BaseSpec."""

    name: str
    casts: bool

    def label(self, config: C) -> str:
        """Return the model's name in banners and tables."""
        return getattr(config, "name", self.name)

    def words(self, config: C) -> str:
        """Return the model's description for the banner, printed after the number of parameters."""
        return ""

    def attention(self, config: C) -> tuple[int, int, bool] | None:
        """Return the number of heads, the head width, and True if attention has dropout, otherwise False. If None, the
        banner has no line on the SDPA kernel."""
        return None

    def flops(self, config: C, length: int) -> tuple[int, int] | None:
        """Return the FLOPs per token, forward and backward, of one block and of everything after the last block. If
        None, FLOPs are counted for MFU (PlainModule.count_flops), and pipeline stages treat all blocks as equal."""
        return None

    def idle_parameters(self, config: C) -> int:
        """Return the number of parameters in the experts that a token is not routed to, over all layers."""
        return 0

    def uses(self, config: C, op: str) -> bool:
        """Return True if the model runs an op of gptlite.ops, such as `rope`."""
        return self.casts

    def norms_have_biases(self, config: C) -> bool:
        """Return True if norms have biases, as Apex's norms do."""
        return False
