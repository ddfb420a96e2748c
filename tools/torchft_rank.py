"""Rank of torchft 0.2.0, for tools/bench_elastic.py: GPT-lite's sizes, two replica groups of one rank, on a CPU.

TORCHFT_LIGHTHOUSE=http://HOST:PORT REPLICA_GROUP_ID=0 torchrun ... torchft_rank.py WAY STEPS BATCH FOLDER

Runs without gptlite, as torchft's example train_ddp.py does: its Manager with ProcessGroupGloo, and its Optimizer. WAY
is `ddp`, its DistributedDataParallel, whose survivors end with the lost replica (findings/torchft_ddp_survivor.sh), or
`allreduce`, its Manager.allreduce on the gradients. At step n, replica group r reads samples n * BATCH + r, + r + 2,
..., which is the division of torchft.DistributedSampler, at the manager's step. Each committed step is a line of
FOLDER/GROUP.jsonl.
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

GROUPS = 2
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 256, 8, 4, 256


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, LENGTH, WIDTH)."""
        batch = x.shape[0]
        heads = self.qkv(self.norms[0](x)).view(batch, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).reshape(batch, LENGTH, WIDTH))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """GPT-lite: 4 layers, 8 heads, d 256, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, LENGTH). Returns logits."""
        x = self.tokens(tokens) + self.positions.weight
        return self.norm(self.blocks(x)) @ self.tokens.weight.T / WIDTH**0.5


def sample(number: int) -> torch.Tensor:
    """Return LENGTH + 1 tokens, which depend on the number alone."""
    return torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))


def load(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take over another replica's state."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def reduce(manager: Manager, model: nn.Module) -> None:
    """Average the gradients over replicas. After an error, the manager discards the step."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def main(way: str, steps: int, batch: int, folder: str) -> None:
    """Train until the manager has committed `steps` steps."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),  # as in train_ddp.py
        min_replica_size=1,
        load_state_dict=lambda state: load(state, model, optimizer),
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"bench_{group}",
        timeout=timedelta(seconds=30),
    )
    parallel = DistributedDataParallel(manager, model) if way == "ddp" else model
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=3e-4))
    with open(f"{folder}/{group}.jsonl", "a", buffering=1, encoding="utf-8") as log:
        while (step := manager.current_step()) < steps:
            numbers = range(step * batch + group, (step + 1) * batch, GROUPS)
            tokens = torch.stack([sample(number) for number in numbers])
            optimizer.zero_grad()  # begins the quorum
            loss = F.cross_entropy(parallel(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if way == "allreduce":
                reduce(manager, model)
            participates = manager.is_participating()
            optimizer.step()  # commits if all replicas have succeeded
            if (now := manager.current_step()) > step:
                used = list(numbers) if participates else []
                row = {"at": time.time(), "step": now, "samples": used, "loss": loss.item()}
                log.write(json.dumps(row | {"replicas": manager.num_participants()}) + "\n")
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
