"""A GPT as in the papers: pre-LN blocks, learned positions (GPT-2, Radford et al. 2019; GPT-3, arXiv:2005.14165).

Shapes: B sequences, S positions, d model width, H heads, D head width, V vocabulary.
"""

import torch
from torch import Tensor, nn

from gptlite.model.attention import CausalSelfAttention
from gptlite.model.cache import LayerCache
from gptlite.model.config import GPTConfig
from gptlite.model.layers import LayerNorm
from gptlite.model.mlp import MLP
from gptlite.ops.cross_entropy import linear_cross_entropy
from gptlite.ops.dropout import DropoutKey, dropout
from gptlite.ops.select import Ops

# Dropout sites, unique in the model: the embedding is 0, block i has 3i+1 ... 3i+3.
EMBEDDING_SITE, SITES_PER_BLOCK = 0, 3


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x [B, S, d]."""

    def __init__(self, config: GPTConfig, ops: Ops, seed: int) -> None:
        super().__init__()
        self.seed, self.dropout = seed, config.dropout
        self.attn_norm = LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias)
        self.attn = CausalSelfAttention(config, ops)
        self.mlp_norm = LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, sample_ids: Tensor | None = None, sites: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Dropout needs the batch's sample_ids [B] and the numbers of its sites [3]."""
        attention_key, residual_key, mlp_key = (self._key(i, sample_ids, sites) for i in range(SITES_PER_BLOCK))
        x = x + dropout(self.attn(self.attn_norm(x), attention_key, cache), self.dropout, residual_key)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, mlp_key)

    def _key(self, i: int, sample_ids: Tensor | None, sites: Tensor | None) -> DropoutKey | None:
        if sample_ids is None or sites is None:
            return None
        return DropoutKey(self.seed, sites[i], sample_ids)


class GPT(nn.Module):
    """The whole model. `seed` keys its dropout masks; `compute_dtype` is the activations' dtype.

    Layers are stored under their global number, so that a part of a pipeline keeps the names of the whole.
    """

    def __init__(self, config: GPTConfig, ops: Ops | None = None, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.compute_dtype = torch.float32
        width = config.d_model
        self.token_embedding = nn.Embedding(config.padded_vocab_size, width)
        self.position_embedding = nn.Embedding(config.sequence_length, width)
        self.layers = nn.ModuleDict({str(i): Block(config, ops or Ops(), seed) for i in range(config.num_layers)})
        self.final_norm = LayerNorm(width, config.layer_norm_eps, bias=config.bias)
        self.head = nn.Linear(width, config.padded_vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Makes the head's weight the token embedding's, if the configuration says so."""
        if self.config.tied_embeddings:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor, sample_ids: Tensor | None = None) -> Tensor:
        """The sum of the token losses, fp32, in nats.

        tokens, targets [B, S] int64 (a target of -100 counts nothing); sample_ids [B], the global sample numbers that
        dropout is drawn from while training.
        """
        hidden = self.hidden(tokens, sample_ids)
        weight = self.head.weight.to(hidden.dtype)
        vocab_size = self.config.vocab_size or len(weight)
        return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), vocab_size)

    def logits(self, tokens: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """Logits [B, V] of the token after the last. With caches, `tokens` continue what they hold."""
        last = self.hidden(tokens, None, caches)[:, -1]
        return (last @ self.head.weight[: self.config.vocab_size].to(last.dtype).t()).float()

    def hidden(self, tokens: Tensor, sample_ids: Tensor | None, caches: list[LayerCache] | None = None) -> Tensor:
        """The final norm's output [B, S, d]. Raises ValueError past the learned positions."""
        start = caches[0].length if caches else 0
        end = start + tokens.shape[1]
        if end > self.config.sequence_length:
            raise ValueError(f"{end} positions, but model.sequence_length={self.config.sequence_length}")
        # Each cast before they are added, as FSDP2 casts parameters before they are used.
        x = self.token_embedding(tokens).to(self.compute_dtype)
        x = x + self.position_embedding.weight[start:end].to(self.compute_dtype)
        sites = None
        if sample_ids is not None and self.training and self.config.dropout > 0.0:
            x = dropout(x, self.config.dropout, DropoutKey(self.seed, EMBEDDING_SITE, sample_ids))
            # A tensor: as a Python number it would be compiled into each block, a graph a layer.
            count = SITES_PER_BLOCK * self.config.num_layers
            sites = EMBEDDING_SITE + 1 + torch.arange(count, device=x.device).view(-1, SITES_PER_BLOCK)
        for i, (number, block) in enumerate(self.layers.items()):
            x = block(x, sample_ids, None if sites is None else sites[int(number)], caches[i] if caches else None)
        return self.final_norm(x)
