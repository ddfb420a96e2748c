"""Configuration of a GPT. Does not import torch, so that composing a configuration stays fast."""

from dataclasses import dataclass, field
from enum import Enum

from gptlite.models.config import ModelConfig

WIDTH_MULTIPLE = 16  # default expert widths are rounded down to a multiple of this, for aligned GEMMs
FFN_MULTIPLE = 64  # default widths of gated MLPs are rounded up to a multiple of this, which tensor degrees divide


class Position(Enum):
    """Position encoding: learned embeddings added to the token embeddings (GPT-2), or rotations of queries and keys
    (RoPE)."""

    learned = "learned"
    rope = "rope"


class Norm(Enum):
    """Norm of the residual stream: layer norm, or RMS norm, which subtracts no mean and has no bias."""

    layer_norm = "layer_norm"
    rms_norm = "rms_norm"


class MLPKind(Enum):
    """Nonlinearity of the MLP.

    `gelu_tanh` is GPT-2's approximation, `gelu_erf` the exact form. `relu2` is ReLU squared (arXiv:2109.08668).
    `swiglu` and `geglu` (exact GELU) multiply the activation by a second projection (arXiv:2002.05202).
    """

    gelu_tanh = "gelu_tanh"
    gelu_erf = "gelu_erf"
    relu = "relu"
    relu2 = "relu2"
    swiglu = "swiglu"
    geglu = "geglu"

    @property
    def gated(self) -> bool:
        """True for a kind with a second projection, the gate."""
        return self in (MLPKind.swiglu, MLPKind.geglu)


class Score(Enum):
    """Function that turns the router's logits into expert scores: softmax (Mixtral, OLMoE, Qwen3), or sigmoid
    (DeepSeek-V3)."""

    softmax = "softmax"
    sigmoid = "sigmoid"


@dataclass
class MoEConfig:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv:1701.06538), without a capacity limit per
    expert. `experts: 0` turns it off.

    Each token goes to the `top_k` experts with the highest scores. Their outputs are summed, weighted by the scores.
    Three terms regulate the router, each independent of micro-batches and layout. `bias_rate`: step size of a bias per
    expert, which is added to the scores only to select experts. The bias rises for experts with less than the mean
    load of the global batch, and falls for those with more (arXiv:2408.15664). `sequence_loss`: coefficient of a loss
    that balances the load within each sequence (DeepSeek-V3, arXiv:2412.19437, equation 17). `z_loss`: coefficient of
    the squared log-sum-exp of the router's logits, which keeps them small (ST-MoE, arXiv:2202.08906, equation 5). These
    losses are means over tokens, summed over the layers; the reported loss excludes them. Experts have no biases.
    """

    experts: int = 0
    top_k: int = 2
    d_ff: int | None = None  # hidden width of an expert; null: model.d_ff / (top_k + shared), the FLOPs of a dense MLP
    shared: int = 0  # number of shared experts, which process every token and have the same width
    every: int = 1  # every Nth layer, starting with the Nth, has experts; the others have an MLP
    score: Score = Score.softmax
    renormalize: bool = True  # scale each token's weights to a sum of 1
    bias_rate: float = 1e-3
    sequence_loss: float = 0.0
    z_loss: float = 0.0


@dataclass
class GPTConfig(ModelConfig):
    """A pre-norm GPT; the defaults are GPT-2's architecture.

    `vocab_size: null` uses the tokenizer's vocabulary size. On every layout, the embedding is padded to a multiple of
    `vocab_multiple` rows, and the padding has probability 0. `peak_lr` is the published learning rate for this model
    size; `optimizer.lr` refers to it by interpolation.

    `rope_scaling` stretches RoPE for contexts longer than those of pretraining, as in Llama 3.1: wavelengths above
    rope_original_length / rope_low_freq_factor are multiplied by it, wavelengths below rope_original_length /
    rope_high_freq_factor are unchanged, and those in between are interpolated.
    """

    name: str = "custom"
    num_layers: int = 4
    num_heads: int = 8
    kv_heads: int | None = None  # key/value heads, each shared by num_heads / kv_heads query heads; null: num_heads
    head_dim: int | None = None  # null: d_model / num_heads
    d_model: int = 256
    d_ff: int | None = None  # null: 4 d_model; with a gated MLP 8/3 d_model, rounded up to a multiple of 64
    vocab_size: int | None = None  # null: the tokenizer's
    vocab_multiple: int = 128
    sequence_length: int = 256  # maximum sequence length, and number of learned position embeddings
    position: Position = Position.learned
    rope_base: float = 10000.0
    rope_scaling: float = 1.0  # 1: no scaling
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8192
    norm: Norm = Norm.layer_norm
    norm_gain: bool = True  # false: an RMS norm without parameters
    norm_eps: float = 1e-5
    windows: list[int] = field(default_factory=list)  # attention window per layer, repeated as needed; 0: full
    value_residual: bool = False  # mix the values of each later layer with those of the first
    qk_norm: bool = False  # RMS norm of each query and key head, before RoPE
    qk_norm_heads: bool = True  # false: one norm over all query heads, one over all key heads (OLMo 2, OLMoE)
    mlp: MLPKind = MLPKind.gelu_tanh
    moe: MoEConfig = field(default_factory=MoEConfig)
    bias: bool = True
    dropout: float = 0.0  # embedding, residual and attention dropout
    tied_embeddings: bool = True
    softcap: float | None = None  # logits become softcap tanh(logits / softcap)
    z_loss: float = 0.0  # coefficient, in training, of the mean over tokens of the squared log-sum-exp of the logits
    init_std: float = 0.02
    zero_init: bool = False  # initialize residual projections with 0
    peak_lr: float = 6e-4

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's hidden layer."""
        if self.d_ff is not None:
            return self.d_ff
        return -(-8 * self.d_model // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE if self.mlp.gated else 4 * self.d_model

    @property
    def up_size(self) -> int:
        """Number of outputs of the MLP's first layer."""
        return self.up_width(self.ffn_size)

    def up_width(self, hidden: int) -> int:
        """Return the number of outputs of the first layer of an MLP with a hidden layer of that width."""
        return hidden * (2 if self.mlp.gated else 1)

    @property
    def expert_size(self) -> int:
        """Width of an expert's hidden layer."""
        if self.moe.d_ff is not None:
            return self.moe.d_ff
        even = self.ffn_size // (self.moe.top_k + self.moe.shared)
        return max(WIDTH_MULTIPLE, even // WIDTH_MULTIPLE * WIDTH_MULTIPLE)

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer has experts instead of an MLP."""
        return self.moe.experts > 0 and (layer + 1) % self.moe.every == 0

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers // self.moe.every if self.moe.experts else 0

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    def window(self, layer: int) -> int:
        """Return a layer's attention window: the number of positions, up to its own, that a query attends to; 0 for
        all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    @property
    def stage_width(self) -> int:
        """Width of the activations between pipeline stages, including the first layer's values if later layers take
        them."""
        return self.d_model + (self.kv_size if self.value_residual else 0)

    @property
    def kv_size(self) -> int:
        """Total width of all key heads, which is also that of all value heads."""
        return self.num_kv_heads * self.head_width

    @property
    def query_size(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * self.head_width

    @property
    def qkv_size(self) -> int:
        """Number of outputs of the fused projection of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_width

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding weight. Raises ValueError while `vocab_size` is null."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is null: set it, or use the tokenizer's")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
