"""Configuration of a GPT. No torch here: composing a configuration must stay fast."""

from dataclasses import dataclass, field
from enum import Enum

from gptlite.models.config import ModelConfig

WIDTH_MULTIPLE = 16  # default widths of experts are rounded down to it, for aligned products
FFN_MULTIPLE = 64  # default widths of gated MLPs are rounded up to it, so that tensor degrees divide them


class Position(Enum):
    """Positions: learned embeddings added to the tokens' (GPT-2), or rotations of queries and keys (RoPE)."""

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
        """True for a kind with a second projection."""
        return self in (MLPKind.swiglu, MLPKind.geglu)


class Score(Enum):
    """Scores of the experts, from the router's logits: softmax (Mixtral, OLMoE, Qwen3), or sigmoid (DeepSeek-V3)."""

    softmax = "softmax"
    sigmoid = "sigmoid"


@dataclass
class MoEConfig:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv:1701.06538), without limits to an expert's
    tokens; off with 0 experts.

    A token goes to the `top_k` experts of highest score, and their outputs are added up, weighted by the scores. Three
    terms balance the experts' loads, each independent of micro-batches and layout. `bias_rate`: the step of a bias,
    added to the scores only to choose experts, that rises for those with less than the mean load of the global batch
    (arXiv:2408.15664). `sequence_loss`: the coefficient of a loss on each sequence's balance (DeepSeek-V3,
    arXiv:2412.19437, equation 17). `z_loss`: the coefficient of the squared log-sum-exp of the logits (ST-MoE,
    arXiv:2202.08906, equation 5). Losses are means over tokens, summed over the layers; the reported loss excludes
    them. Experts have no biases.
    """

    experts: int = 0
    top_k: int = 2
    d_ff: int | None = None  # width of an expert; null: model.d_ff / (top_k + shared), as many FLOPs as a dense MLP
    shared: int = 0  # experts that all tokens take, each as wide as the others
    every: int = 1  # every Nth layer, from the Nth on, has experts, the others an MLP
    score: Score = Score.softmax
    renormalize: bool = True  # a token's weights sum to 1
    bias_rate: float = 1e-3
    sequence_loss: float = 0.0
    z_loss: float = 0.0


@dataclass
class GPTConfig(ModelConfig):
    """A pre-norm GPT; the defaults are GPT-2's architecture.

    `vocab_size: null` takes the tokenizer's. The embedding is always padded to a multiple of `vocab_multiple`, whatever
    the layout, and the padding gets no probability. `peak_lr` is the published learning rate of this size:
    `optimizer.lr` takes it by interpolation.

    `rope_scaling` stretches RoPE for contexts longer than those of pretraining, as Llama 3.1 does: wavelengths above
    rope_original_length / rope_low_freq_factor are multiplied by it, those below rope_original_length /
    rope_high_freq_factor are unchanged, and those between are interpolated.
    """

    name: str = "custom"
    num_layers: int = 4
    num_heads: int = 8
    kv_heads: int | None = None  # of keys and values, each shared by num_heads / kv_heads queries; null: num_heads
    head_dim: int | None = None  # null: d_model / num_heads
    d_model: int = 256
    d_ff: int | None = None  # null: 4 d_model; with a gated MLP 8/3 d_model, rounded up to a multiple of 64
    vocab_size: int | None = None  # null: the tokenizer's
    vocab_multiple: int = 128
    sequence_length: int = 256  # the longest sequence: the number of learned positions
    position: Position = Position.learned
    rope_base: float = 10000.0
    rope_scaling: float = 1.0  # 1: none
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8192
    norm: Norm = Norm.layer_norm
    norm_gain: bool = True  # false: an RMS norm without parameters
    norm_eps: float = 1e-5
    windows: list[int] = field(default_factory=list)  # last positions seen by each layer, repeated over them; 0: all
    value_residual: bool = False  # v of each later layer is mixed with the first layer's
    value_embeddings: int = 0  # every Nth layer, ending with the last, mixes v with a table of the tokens; 0: none
    qk_norm: bool = False  # RMS norm of each query and key head, before RoPE
    qk_norm_heads: bool = True  # false: of all query heads together, and of all key heads (OLMo 2, OLMoE)
    mlp: MLPKind = MLPKind.gelu_tanh
    moe: MoEConfig = field(default_factory=MoEConfig)
    bias: bool = True
    dropout: float = 0.0  # embedding, residual and attention dropout
    tied_embeddings: bool = True
    softcap: float | None = None  # logits become softcap tanh(logits / softcap)
    init_std: float = 0.02
    zero_init: bool = False  # residual projections begin at 0
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
        """Return the number of positions up to its own that a query of a layer attends to; 0 for all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def has_value_residual(self, layer: int) -> bool:
        """Return True if a layer mixes the first layer's values with its own."""
        return self.value_residual and layer > 0

    def has_value_embedding(self, layer: int) -> bool:
        """Return True if a layer has a table of values by token. The last layer has one, as in nanochat."""
        return self.value_embeddings > 0 and (self.num_layers - 1 - layer) % self.value_embeddings == 0

    @property
    def mixed_layers(self) -> int:
        """Number of layers that mix their values with others."""
        return sum(self.has_value_residual(i) or self.has_value_embedding(i) for i in range(self.num_layers))

    @property
    def stage_width(self) -> int:
        """Width of the activations between pipeline stages, with the first layer's values if others take them."""
        return self.d_model + (self.kv_size if self.value_residual else 0)

    @property
    def kv_size(self) -> int:
        """Width of all values together."""
        return self.num_kv_heads * self.head_width

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_width

    @property
    def qkv_size(self) -> int:
        """Number of outputs of the fused projection of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_width

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding weight. Raises ValueError while `vocab_size` is null."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is null: set it, or take the tokenizer's")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
