"""Implementations of a training step to compare, and the measurement of one of them in a process of its own."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from nanogpt import Size, nanogpt_step, random_batch
from real_step import build_step, model_of, run_config

from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.ops.config import Implementation, OpsConfig
from gptlite.ops.select import select_ops
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import PrecisionConfig

from .steps import forget, mfu

VOCABULARY = {"tiny": 256}  # of sizes other than these: GPT-2's, as padded by nanoGPT
PADDED = 50304
BLOCKS, BLOCK_SECONDS = 7, 0.25  # timed blocks of steps, and the least duration of one


@dataclass(frozen=True)
class Contender:
    """Implementation of a step. `package` is empty for gptlite, otherwise `nanogpt` or `transformers`."""

    name: str
    package: str = ""
    llama: bool = False  # RoPE, RMS norm and SwiGLU instead of GPT-2's architecture
    reference: bool = False  # ops=reference
    compile: bool = False
    precision: str = "bf16"
    fp8_head: bool = False
    graph: bool = False

    def lacks(self, peer: str | None, device: str) -> str:
        """Return what this machine or this source tree lacks for the measurement; an empty string if nothing."""
        if self.package == "nanogpt":
            return "" if peer else "peer=NANOGPT is not given"
        if self.package and find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        if self.fp8_head and "fp8_head" not in {field.name for field in fields(PrecisionConfig)}:
            return "this source tree has no precision.fp8_head"
        if self.graph and find_spec("gptlite.satellites.graph") is None:
            return "this source tree has no trainer.cuda_graph"
        return "CUDA graphs need a GPU" if self.graph and device == "cpu" else ""


# What is compared, by name. All have no biases, and a vocabulary that needs no padding.
CONTENDERS = {
    each.name: each
    for each in (
        Contender("kernels"),
        Contender("kernels compiled", compile=True),
        Contender("reference compiled", reference=True, compile=True),
        Contender("nanoGPT compiled", "nanogpt", compile=True),
        Contender("Llama kernels", llama=True),
        Contender("Llama kernels compiled", llama=True, compile=True),
        Contender("transformers' Llama compiled", "transformers", llama=True, compile=True),
        Contender("graph", graph=True),
        Contender("bf16 compiled", compile=True),
        Contender("bf16, fp8 head, compiled", compile=True, fp8_head=True),
        Contender("fp8 compiled", compile=True, precision="fp8"),
        Contender("fp8, fp8 head, compiled", compile=True, precision="fp8", fp8_head=True),
    )
}


def shape_of(size: str, llama: bool) -> GPTConfig:
    """Return the configuration of a model of `size`. A Llama has about as many parameters in its blocks."""
    config = replace(model_of(size), vocab_size=VOCABULARY.get(size, PADDED), bias=False)
    architecture = {"position": Position.rope, "norm": Norm.rms_norm, "mlp": MLPKind.swiglu} if llama else {}
    return replace(config, **architecture)


def step_of(who: Contender, config: GPTConfig, micro_batch: int, device: torch.device, peer: str) -> Callable[[], Any]:
    """Return the training step of a contender, of one micro-batch. `peer` is the clone of nanoGPT."""
    shape = (config.vocab_size or 0, config.d_model, config.num_heads, config.num_layers, config.sequence_length)
    if who.package == "nanogpt":
        return nanogpt_step(Path(peer).expanduser(), Size(*shape, micro_batch), "bf16_compile")
    if who.package == "transformers":
        return transformers_step(config, Size(*shape, micro_batch), device)
    implementation = Implementation.reference if who.reference else Implementation.auto
    ops = select_ops(OpsConfig(implementation), device)
    run = run_config(config, who.precision, compile=who.compile)
    if who.fp8_head:
        run.precision = replace(run.precision, **{"fp8_head": True})
    return build_step(run, Mesh(device), micro_batch, ops=ops, execute=_graph() if who.graph else None)


def _graph() -> Any:
    """Return what replays steps from a CUDA graph, as `trainer.cuda_graph=auto` does."""
    from gptlite.satellites.graph.recorder import CudaRecorder  # pyright: ignore[reportMissingImports]
    from gptlite.satellites.graph.steps import RecordedSteps  # pyright: ignore[reportMissingImports]

    return RecordedSteps(CudaRecorder(), print)


def transformers_step(config: GPTConfig, size: Size, device: torch.device) -> Callable[[], None]:
    """Return a step of transformers' Llama: compiled, in bf16 by autocast, with torch's fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"vocab_size": size.vocab_size, "hidden_size": size.d_model}
    shape |= {"num_hidden_layers": size.num_layers, "num_attention_heads": size.num_heads}
    shape |= {"intermediate_size": config.ffn_size, "max_position_embeddings": size.sequence_length}
    options = {"tie_word_embeddings": True, "use_cache": False, "attn_implementation": "sdpa"}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, **options))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward: Any = torch.compile(model)
    tokens, _ = random_batch(size, device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], Any], device: torch.device, blocks: int = BLOCKS) -> list[float]:
    """Return the mean seconds of a step in each of several blocks of steps. The host waits only between blocks."""

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    for _ in range(5):  # compile, choose kernels, record a graph
        one = block(1)
    count = max(1, round(BLOCK_SECONDS / one))
    return [block(count) for _ in range(blocks)]


def measure(who: Contender, size: str, micro_batch: int, device: torch.device, peer: str) -> dict[str, Any]:
    """Build and time the step of a contender. `first` is the seconds from its beginning to the first timed step."""
    cuda, start = device.type == "cuda", time.perf_counter()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    config = shape_of(size, who.llama)
    step = step_of(who, config, micro_batch, device, peer)
    took = timed(step, device, BLOCKS if cuda else 3)
    seconds = statistics.median(took)
    rate = micro_batch * config.sequence_length / seconds
    memory = torch.cuda.max_memory_allocated(device) if cuda else 0
    numbers = {"seconds": seconds, "lowest": min(took), "highest": max(took), "tokens_per_second": rate}
    share = mfu(rate, config, device)
    return {**numbers, "mfu": share, "memory": memory, "first": time.perf_counter() - start - sum(took)}


def main(name: str, size: str, micro_batches: Sequence[int], device: str, peer: str) -> int:
    """Measure a contender with each micro-batch, and print each result as a line of JSON. Returns the exit code."""
    for micro_batch in micro_batches:
        result: dict[str, Any] = {"micro_batch": micro_batch}
        try:
            result |= measure(CONTENDERS[name], size, micro_batch, torch.device(device), peer)
        except torch.OutOfMemoryError:
            result["error"] = "out of memory"
        print(json.dumps(result), flush=True)
        forget(torch.device(device))
    return 0


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
