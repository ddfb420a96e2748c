"""Configuration of a GPT. No torch here: composing a configuration must stay fast."""

from dataclasses import dataclass
from enum import Enum

from gptlite.models.config import ModelConfig


class Activation(Enum):
    """Nonlinearity of the MLP; `gelu_tanh` is GPT-2's approximation, `gelu_erf` the exact form."""

    gelu_tanh = "gelu_tanh"
    gelu_erf = "gelu_erf"
    relu = "relu"


@dataclass
class GPTConfig(ModelConfig):
    """A pre-LN GPT: learned positions, fused QKV, GELU MLP.

    `vocab_size: null` takes the tokenizer's. The embedding is always padded to a multiple of `vocab_multiple`, whatever
    the layout, and the padding gets no probability. `peak_lr` is the published learning rate of this size:
    `optimizer.lr` takes it by interpolation.
    """

    name: str = "custom"
    num_layers: int = 4
    num_heads: int = 8
    d_model: int = 256
    d_ff: int | None = None  # null: 4 * d_model
    vocab_size: int | None = None  # null: the tokenizer's
    vocab_multiple: int = 128
    sequence_length: int = 256  # the longest sequence: the number of learned positions
    activation: Activation = Activation.gelu_tanh
    bias: bool = True
    dropout: float = 0.0  # embedding, residual and attention dropout
    tied_embeddings: bool = True
    layer_norm_eps: float = 1e-5
    init_std: float = 0.02
    peak_lr: float = 6e-4

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding weight. Raises ValueError while `vocab_size` is null."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is null: set it, or take the tokenizer's")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
