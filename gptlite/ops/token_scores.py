"""Scores of given tokens: the log probability of each, and whether it is the most likely token."""

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.ops.inputs import IGNORE

ROWS = 512  # logits computed at a time: 103 MB in fp32 for GPT-2's vocabulary


def token_scores(hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Return fp32 [B, S, 2]: the log probability of each target, and 1 if no token is more likely, otherwise 0.

    `logits` maps rows of hidden [B, S, d] to logits [N, V]. It is called only with the rows whose target, int64 [B, S],
    is not IGNORE. The scores of all other rows are 0.
    """
    wanted = targets != IGNORE
    chunks = []
    for rows, tokens in zip(hidden[wanted].split(ROWS), targets[wanted].split(ROWS), strict=True):
        scores = logits(rows).float()
        chosen = scores.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        chunks.append(torch.stack([chosen, (scores.argmax(-1) == tokens).float()], dim=1))
    out = torch.zeros(*targets.shape, 2, device=targets.device)
    out[wanted] = torch.cat(chunks)
    return out
