"""A pre-norm GPT: GPT-2 (Radford et al. 2019), GPT-3 (arXiv:2005.14165), Llama 3 (arXiv:2407.21783) and others, by
configuration.

Shapes: B sequences of length S, hidden size d, H heads of width D, vocabulary size V.
"""

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.models.gpt.attention import CausalSelfAttention, ContextCut, TensorCut
from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.config import GPTConfig, Norm, Position
from gptlite.models.gpt.mlp import MLP
from gptlite.models.gpt.moe import MoE
from gptlite.models.gpt.values import parted, with_values
from gptlite.models.layers import Head, LayerNorm, ResidualNorm, RMSNorm
from gptlite.ops.attention import Mask, Spans
from gptlite.ops.cross_entropy import LossGradient
from gptlite.ops.dropout import DropoutKey, dropout
from gptlite.ops.embedding import TableGradient, embedding
from gptlite.ops.inputs import Documents
from gptlite.ops.layer_norm import biased
from gptlite.ops.rope import Angles, frequencies, rotary, scaled_frequencies
from gptlite.ops.select import Ops
from gptlite.ops.token_scores import token_scores

if TYPE_CHECKING:
    from gptlite.precision import Policy

# Dropout sites have unique numbers in the model: 0 for the embedding, 3i + 1 to 3i + 3 for block i.
EMBEDDING_SITE, SITES_PER_BLOCK = 0, 3
FLASH_WIDTH = 256  # largest head width of flash attention with spans; widths must be multiples of 8


def positions(tensor: TensorCut | None, context: ContextCut | None, count: int) -> tuple[int, int]:
    """Return the sequence position of the first of `count` local activations, and the number of positions that are
    skipped between their first and second half."""
    index, slices = (tensor.rank, tensor.size) if tensor is not None and tensor.sequence else (0, 1)
    if context is None or context.whole:
        return index * count, 0
    return context.positions(index * count, count, slices * count)


def _norm(config: GPTConfig, ops: Ops) -> ResidualNorm:
    match config.norm:
        case Norm.rms_norm:
            return RMSNorm(config.d_model, config.norm_eps, gain=config.norm_gain, fused=ops.layer_norm)
        case Norm.layer_norm:
            options = {"bias": config.bias, "fused": ops.layer_norm, "apex": ops.apex_norm}
            return LayerNorm(config.d_model, config.norm_eps, **options)


class ResidualStream(NamedTuple):
    """Residual stream x [B, S, d] with a pending addition, dropout(added + bias). The next norm adds and normalizes in
    one pass over memory."""

    x: Tensor
    added: Tensor
    bias: Tensor | None
    key: DropoutKey | None

    def normed(self, norm: ResidualNorm, p: float) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum."""
        return norm.after_residual(self.added, self.x, p, self.key, self.bias)

    def sum(self, p: float, fused: bool) -> Tensor:
        """Return the stream with the pending addition."""
        return self.x + dropout(biased(self.added, self.bias), p, self.key, fused)


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)); x [B, S, d].

    With `deferred_add`, the next block computes the second sum, and the output biases of attention and MLP are added
    together with the sums.
    """

    def __init__(self, config: GPTConfig, ops: Ops, seed: int, layer: int) -> None:
        super().__init__()
        self.seed, self.dropout = seed, config.dropout
        self.tensor_axis: TensorCut | None = None
        self.context: ContextCut | None = None
        self.fused_dropout, self.deferred_add = ops.dropout, ops.deferred_add
        self.attn_norm = _norm(config, ops)
        self.attn = CausalSelfAttention(config, ops, layer)
        self.mlp_norm = _norm(config, ops)
        self.mlp: MLP | MoE
        if config.has_experts(layer):
            self.mlp = MoE(config, ops)
        else:
            self.mlp = MLP(config, ops, width=config.ffn_size, bias=config.bias)

    def forward(
        self,
        x: Tensor | ResidualStream,
        sample_ids: Tensor | None = None,
        sites: Tensor | None = None,
        cache: LayerCache | None = None,
        mask: Mask = None,
        rotary: Angles | None = None,
        first: Tensor | None = None,
    ) -> Tensor | ResidualStream | tuple[Tensor | ResidualStream, Tensor]:
        """Return the block's output. If later blocks take this block's attention values as `first`, return the values
        as well.

        Dropout needs the batch's `sample_ids` [B] and `sites` [3], the numbers of the block's dropout sites. `mask`,
        `rotary` and `first` are arguments of CausalSelfAttention.forward.
        """
        normed, x = x.normed(self.attn_norm, self.dropout) if isinstance(x, ResidualStream) else (self.attn_norm(x), x)
        start, gap = positions(self.tensor_axis, self.context, x.shape[1])
        attention_key = self._key(0, sample_ids, sites, 0)  # attention always gets whole sequences
        residual_key, mlp_key = (self._key(i, sample_ids, sites, start, gap) for i in (1, 2))
        inputs = attention_key, cache, mask, rotary, first
        attended, values = self.attn(normed, *inputs, bias=not self.deferred_add)
        attended = attended.to(x.dtype)
        bias = self.attn.proj.bias if self.deferred_add else None
        normed, x = self.mlp_norm.after_residual(attended, x, self.dropout, residual_key, bias)
        added = self.mlp(normed, sample_ids=sample_ids, bias=not self.deferred_add).to(x.dtype)
        if not self.deferred_add:
            out = x + dropout(added, self.dropout, mlp_key, self.fused_dropout)
        else:
            bias = self.mlp.local_bias()
            # Clone the bias: ZeRO frees a block's parameters after its forward pass.
            out = ResidualStream(x, added, None if bias is None else bias.clone(), mlp_key)
        return out if values is None else (out, values)

    def _key(
        self, i: int, sample_ids: Tensor | None, sites: Tensor | None, first: int, gap: int = 0
    ) -> DropoutKey | None:
        if sample_ids is None or sites is None:
            return None
        return DropoutKey(self.seed, sites[i], sample_ids, first, gap=gap)


class GPT(nn.Module):
    """The whole model, or the part of it in one pipeline stage.

    `seed` keys the dropout masks; `compute_dtype` is the activations' dtype. Layers are stored under their global
    index, so that a part has the same parameter names as the whole model.
    """

    def __init__(self, config: GPTConfig, ops: Ops | None = None, seed: int = 0) -> None:
        super().__init__()
        ops = ops or Ops()
        self.config, self.seed, self.fused_dropout, self.fused_table = config, seed, ops.dropout, ops.table
        self.varlen = ops.varlen and config.head_width % 8 == 0 and config.head_width <= FLASH_WIDTH
        self.compute_dtype = torch.float32
        self.tensor_axis: TensorCut | None = None  # set if layers are sharded over ranks
        self.context: ContextCut | None = None  # set if sequences are sharded over ranks
        width, rows = config.d_model, config.padded_vocab_size
        self.token_embedding: nn.Module | None = nn.Embedding(rows, width)
        self.position_embedding: nn.Embedding | None = None
        if config.position is Position.learned:
            self.position_embedding = nn.Embedding(config.sequence_length, width)
        self.layers = nn.ModuleDict({str(i): Block(config, ops, seed, i) for i in range(config.num_layers)})
        self.final_norm: nn.Module | None = _norm(config, ops)
        terms = {"softcap": config.softcap, "z_loss": config.z_loss}
        self.head: nn.Module | None = Head(width, rows, ops.cross_entropy, fused=ops.linear, **terms)
        if config.tied_embeddings:
            self.head.weight = self.token_embedding.weight

    def blocks(self) -> list[Block]:
        """Return the layers of this part, in order."""
        return list(self.layers.values())  # type: ignore[arg-type]

    def keep(self, layers: range) -> None:
        """Reduce the whole model to the part with these layers."""
        if layers.start > 0:
            self.token_embedding = self.position_embedding = None
        if layers.stop < self.config.num_layers:
            self.final_norm = self.head = None
        for number in [number for number in self.layers if int(number) not in layers]:
            del self.layers[number]

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None,
        sample_ids: Tensor | None = None,
        caches: list[LayerCache] | None = None,
        documents: Documents | None = None,
        upstream: float | None = None,
        scored: bool = False,
    ) -> Tensor:
        """Return the sum of the token losses, fp32, in nats, including the z-loss in training mode. Without targets,
        return the logits [B, V] of the next token; if `scored`, the scores [B, S, 2] of the targets, see token_scores.

        A part without the head returns its activations [B, S, d]. x: tokens [B, S] int64, or the activations of the
        previous part. `targets` [B, S] int64; -100 is ignored. `sample_ids` [B]: global sample numbers, which key
        dropout in training. `caches`: one KV cache per layer; x then continues the cached tokens. `documents`: document
        boundaries of the whole sequence, even if it is sharded. Positions then count from the start of each document,
        to which attention is restricted. `upstream`: gradient with respect to the sum, if it is known in advance; see
        LossGradient.
        """
        shared = None if targets is None or scored else self._table_gradient()
        hidden = self.hidden(x, sample_ids, caches, documents, shared)
        if self.head is None:
            return hidden
        vocab_size = self.config.vocab_size or self.config.padded_vocab_size
        if targets is None:
            return self.head(hidden[:, -1:], None, vocab_size)
        if scored:
            head = self.head  # without targets, it takes sequences of length 1
            return token_scores(hidden, targets, lambda rows: head(rows.unsqueeze(1), None, vocab_size))
        return self.head(hidden, targets, vocab_size, LossGradient(upstream, shared))

    def hidden(
        self,
        x: Tensor,
        sample_ids: Tensor | None,
        caches: list[LayerCache] | None = None,
        documents: Documents | None = None,
        shared: TableGradient | None = None,
    ) -> Tensor:
        """Return the last layer's output [B, S, d], after the final norm in the last part. Raises ValueError if the
        sequence is longer than `model.sequence_length`."""
        first: Tensor | None = None
        dropping = sample_ids is not None and self.training and self.config.dropout > 0.0
        start = caches[0].length if caches else 0
        if self.token_embedding is not None:
            x = self._embed(x, sample_ids if dropping else None, start, documents, shared)
        elif self.config.value_residual:
            x, first = self._received(x)
        sites, masks = None, self._masks(x, start, documents, dropping)
        if dropping:
            # A tensor: torch.compile would specialize on a Python number and compile one graph per layer.
            count = SITES_PER_BLOCK * self.config.num_layers
            sites = EMBEDDING_SITE + 1 + torch.arange(count, device=x.device).view(-1, SITES_PER_BLOCK)
        turned = self._rotary(x, start, documents) if self.config.position is Position.rope else None
        for i, (number, block) in enumerate(self.layers.items()):
            cache = caches[i] if caches else None
            site = None if sites is None else sites[int(number)]
            out = block(x, sample_ids, site, cache, masks[int(number)], turned, first)
            x, first = out if cast(Block, block).attn.gives_values else (out, first)
        ended = self._ended(x)
        if self.final_norm is not None or first is None:
            return ended
        return with_values(ended, first, self.config.kv_size)

    def _ended(self, x: Tensor | ResidualStream) -> Tensor:
        if not isinstance(x, ResidualStream):
            return x if self.final_norm is None else self.final_norm(x)
        if self.final_norm is None:
            return x.sum(self.config.dropout, self.fused_dropout)
        return x.normed(cast(ResidualNorm, self.final_norm), self.config.dropout)[0]

    def _received(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split the tensor received from the previous part into activations and the first layer's values."""
        config, axis = self.config, self.tensor_axis
        heads = config.num_kv_heads // (1 if axis is None else axis.size)
        return parted(x, config.kv_size, heads, config.head_width, axis.size if axis and axis.sequence else 1)

    def _masks(self, x: Tensor, start: int, documents: Documents | None, dropping: bool) -> dict[int, Mask]:
        """Return attention's mask for each layer, see CausalSelfAttention.forward. Positions start at `start`.
        `dropping`: dropout is on."""
        plain = None if documents is None else self._documents_mask(documents, dropping)
        windows = {int(number): self.config.window(int(number)) for number in self.layers}
        masks: dict[int, Mask] = {0: plain}
        for window in {each for each in windows.values() if each}:
            if isinstance(plain, Tensor):
                past = torch.arange(plain.shape[-1], device=x.device) <= self._places(x, start)[:, None] - window
                masks[window] = plain | past
            else:
                masks[window] = window if plain is None else plain._replace(window=window)
        return {number: masks[window] for number, window in windows.items()}

    def _documents_mask(self, documents: Documents, dropping: bool) -> Tensor | Spans:
        """Return attention's document mask: bool [B, 1, local positions, S], True for keys of other documents. If flash
        attention computes the documents separately, return their spans instead."""
        whole = self.context is None or self.context.whole
        if self.varlen and documents.ends is not None and whole and not dropping:
            return Spans(F.pad(documents.ends.flatten(), (1, 0)), documents.longest)  # the first document starts at 0
        return self._other_documents(documents.starts)

    def _other_documents(self, documents: Tensor) -> Tensor:
        mine = documents
        if self.context is not None and not self.context.whole:
            chunk = documents.shape[1] // (2 * self.context.size)
            starts = self.context.starts(2 * chunk)
            mine = torch.cat([documents[:, start : start + chunk] for start in starts], 1)
        return (mine[:, :, None] != documents[:, None, :]).unsqueeze(1)

    def _places(self, x: Tensor, start: int) -> Tensor:
        """Return the sequence positions that attention processes on this rank; those of a whole sequence begin with
        `start`. x [B, S, d] is the activations between layers, or this rank's slice of them."""
        sliced = self.tensor_axis is not None and self.tensor_axis.sequence
        length = x.shape[1] * (self.tensor_axis.size if sliced and self.tensor_axis else 1)
        if self.context is None or self.context.whole:
            return torch.arange(start, start + length, device=x.device)
        half = torch.arange(length // 2, device=x.device)
        return torch.cat([first + half for first in self.context.starts(length)])

    def _rotary(self, x: Tensor, start: int, documents: Documents | None) -> Angles:
        """Return the cosines and sines that rotate queries and keys. Positions count from the start of each
        document."""
        config, places = self.config, self._places(x, start).unsqueeze(0)
        if documents is not None:
            places = places - documents.starts[:, places[0]]
        inv_freq = frequencies(config.head_width, config.rope_base, places.device)
        if config.rope_scaling != 1:
            limits = config.rope_low_freq_factor, config.rope_high_freq_factor, config.rope_original_length
            inv_freq = scaled_frequencies(inv_freq, config.rope_scaling, *limits)
        cos, sin = rotary(places, inv_freq)
        return cos[:, :, None, None], sin[:, :, None, None]

    def _table_gradient(self) -> TableGradient | None:
        """Return a holder for the head's gradient of a tied weight, if the embedding's backward pass can add to it,
        otherwise None.

        The weight must be unsharded and fp32: a 16-bit addition would round, whereas autograd adds in fp32.
        """
        if not self.fused_table or self.token_embedding is None or not isinstance(self.head, Head):
            return None
        table = self.head.weight
        shared = table is self.token_embedding.weight and table.requires_grad and torch.is_grad_enabled()
        return TableGradient() if shared and table.dtype == torch.float32 else None

    def _embed(
        self,
        tokens: Tensor,
        sample_ids: Tensor | None,
        start: int,
        documents: Documents | None,
        shared: TableGradient | None = None,
    ) -> Tensor:
        """Embed tokens [B, S] at positions from `start` on. With context parallelism, these are this rank's tokens.
        Return [B, S, d], or with sequence parallelism this rank's slice."""
        assert self.token_embedding is not None
        if (end := start + tokens.shape[1]) > self.config.sequence_length:
            raise ValueError(f"the sequence has {end} tokens, but model.sequence_length={self.config.sequence_length}")
        # Cast both embeddings before adding them, for the same result as with FSDP2, which casts parameters before use.
        table = self.token_embedding
        x = embedding(tokens, cast(Tensor, table.weight), self.compute_dtype, shared)
        x = (table(tokens) if x is None else x).to(self.compute_dtype)
        first, gap = positions(self.tensor_axis, self.context, x.shape[1])
        first = start + first
        if self.position_embedding is not None:
            x = self._with_positions(x, self.position_embedding.weight, first, gap, documents)
        if sample_ids is None:
            return x
        key = DropoutKey(self.seed, EMBEDDING_SITE, sample_ids, first, gap=gap)
        return dropout(x, self.config.dropout, key, self.fused_dropout)

    def _with_positions(self, x: Tensor, learned: Tensor, first: int, gap: int, documents: Documents | None) -> Tensor:
        """Add the learned position embeddings from position `first` on, skipping `gap` positions between the two halves
        of x."""
        half = x.shape[1] // 2
        second = first + half + gap
        if documents is not None:
            starts = documents.starts
            counted = torch.arange(starts.shape[1], device=starts.device) - starts
            mine = torch.cat([counted[:, first : first + half], counted[:, second : second + x.shape[1] - half]], 1)
            return x + F.embedding(mine, learned).to(self.compute_dtype)
        if gap:
            added = torch.cat([learned[first : first + half], learned[second : second + half]])
            return x + added.to(self.compute_dtype)
        return x + learned[first : first + x.shape[1]].to(self.compute_dtype)


def prepare_part(part: nn.Module, policy: "Policy", recomputes: bool) -> None:
    """Set a part's dtypes. Turn off variable-length flash attention and deferred additions if the policy does not
    support them."""
    assert isinstance(part, GPT)
    part.compute_dtype = policy.stream_dtype
    part.varlen &= policy.stream_dtype in (torch.bfloat16, torch.float16)  # dtypes of flash attention
    for block in part.blocks():
        # The fused kernel normalizes and adds in a single dtype. Activation checkpointing keeps a block's input; with a
        # pending addition, the input would be two tensors instead of one.
        block.deferred_add &= policy.stream_dtype == policy.compute_dtype and not policy.fp32_norms and not recomputes
