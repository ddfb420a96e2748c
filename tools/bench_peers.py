"""Training steps of the peers in bench_ranks.py, in the fastest configuration that needs no changes to the peer.

DeepSpeed trains nanoGPT's model. With bf16, DeepSpeed stores parameters and reduces gradients in bf16; gptlite
reduces gradients in fp32, which is twice the bytes. DeepSpeed all-reduces gradients (`reduce_scatter: false`), which is
faster with gloo.

picotron trains Llama's model: RoPE, RMSNorm, and SwiGLU of 8/3 the width in place of learned positions, layer norm, and
GELU of 4 times the width. The numbers of parameters and FLOPs are equal, and embeddings are not tied. Its CPU mode
computes in fp32 and does not clip gradients. Two details differ from stock picotron: the GPU is not synchronized after
each message, and rotary tables are fp32 instead of bf16, which is faster.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from nanogpt import Size, nanogpt_model, random_batch

from gptlite.errors import ConfigError


def deepspeed_step(layout: str, size: Size, precision: str, nanogpt: Path) -> Callable[[], None]:
    """Return a step of DeepSpeed's ZeRO engine on nanoGPT's model. Raises ConfigError if DeepSpeed is not installed."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("peer=deepspeed needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed") from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    stage, share = int(layout.removeprefix("zero")), size.batch_size // dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": share,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **({"reduce_scatter": False} if stage == 1 else {})},
        "bf16": {"enabled": precision == "bf16"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    with redirect_stdout(StringIO()):
        deepspeed.init_distributed(dist_backend="gloo")
        model = nanogpt_model(nanogpt, size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    tokens, targets = (each[:share] for each in random_batch(size, torch.device("cpu")))

    def step() -> None:
        loss = engine(tokens, targets)[1]
        engine.backward(loss)
        engine.step()

    return step


def picotron_step(layout: str, size: Size, micro_batches: int, clone: Path) -> Callable[[], None]:
    """Return a step of picotron in CPU mode, as in picotron's train.py."""
    _import_picotron(clone)
    import picotron.process_group_manager as groups  # pyright: ignore[reportMissingImports]
    from picotron.model import Llama  # pyright: ignore[reportMissingImports]
    from picotron.pipeline_parallel import pipeline_parallel  # pyright: ignore[reportMissingImports]
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel  # pyright: ignore[reportMissingImports]

    degree = dist.get_world_size()
    groups.setup_process_group_manager(
        tp_size=degree if layout == "tp2" else 1, cp_size=1, pp_size=degree if layout == "pp2" else 1, dp_size=1
    )
    config = _llama_config(size)
    model: Any = Llama(config)
    if layout == "tp2":
        model = apply_tensor_parallel(model)
    else:
        model = pipeline_parallel.PipelineParallel(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = _Batches(size, micro_batches if layout == "pp2" else 1)
    shape = (loader.micro_batch_size, size.sequence_length, size.d_model)

    def step() -> None:
        optimizer.zero_grad()
        if layout == "pp2":
            pipeline_parallel.train_step_pipeline_1f1b(model, loader, shape, torch.device("cpu"), torch.float32)
        else:  # train_step of picotron's train.py, for one micro-batch
            given = next(loader)
            targets = given["target_ids"].reshape(-1)
            logits = model(input_ids=given["input_ids"]).view(len(targets), -1)
            loss = F.cross_entropy(logits, targets, reduction="mean")
            loss.backward()
            loss.item()
        optimizer.step()

    return step


def llama_flops(size: Size) -> int:
    """Return the FLOPs per token of picotron's model, counted as gptlite/models/gpt/flops.py counts ours."""
    config = _llama_config(size)
    layer = 4 * size.d_model**2 + 3 * size.d_model * config.intermediate_size
    matrices = size.num_layers * layer + size.d_model * size.vocab_size
    return 6 * matrices + 6 * size.num_layers * size.d_model * size.sequence_length


def _llama_config(size: Size) -> Any:
    return SimpleNamespace(
        hidden_size=size.d_model,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        intermediate_size=size.d_model * 8 // 3,
        vocab_size=size.vocab_size,
        num_hidden_layers=size.num_layers,
        max_position_embeddings=size.sequence_length,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )


class _Batches:
    """Stand-in for picotron's loader with random tokens, the same in every step."""

    def __init__(self, size: Size, micro_batches: int) -> None:
        self.grad_acc_steps, self.micro_batch_size = micro_batches, size.batch_size // micro_batches
        tokens, targets = (each[: self.micro_batch_size] for each in random_batch(size, torch.device("cpu")))
        positions = torch.arange(size.sequence_length).expand(len(tokens), -1)
        self._batch = {"input_ids": tokens, "target_ids": targets, "position_ids": positions, "hidden_states": None}

    def __next__(self) -> dict[str, Any]:
        return dict(self._batch)


def _import_picotron(clone: Path) -> None:
    """Make picotron importable without the GPU packages that it imports but does not call in CPU mode."""
    os.environ.update(FLASH_ATTEN="0", DEVICE="cpu", DTYPE="float32")  # read by picotron's model.py
    sys.path.insert(0, str(clone))
    for module, name in (
        ("flash_attn.flash_attn_interface", "flash_attn_func"),
        ("flash_attn.layers.rotary", "apply_rotary_emb"),
        ("flash_attn.ops.triton.layer_norm", "layer_norm_fn"),
    ):
        stub = ModuleType(module)
        setattr(stub, name, None)
        sys.modules.setdefault(module, stub)
    from picotron.pipeline_parallel import pp_communications  # pyright: ignore[reportMissingImports]

    # picotron synchronizes the GPU after each message, which fails with a torch build without CUDA.
    pp_communications.torch = SimpleNamespace(empty=torch.empty, cuda=SimpleNamespace(synchronize=lambda: None))
