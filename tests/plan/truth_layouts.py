"""Layouts whose steps are predicted, and counted on real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gptlite.config import Config, load
from plan.truth import BASE, Counted, counted

MODEL = """
data.vocab_size=500 data.global_batch_size=8 data.micro_batch_size=4
model=gpt-lite model.num_layers=4 model.num_heads=4 model.d_model=64 model.sequence_length=64
""".split()
SAMPLES = """
precision=fp32 schedule=constant schedule.warmup_steps=0 run.dir=unused run.name=truth trainer.max_steps=1000
data.micro_batch_size=4
""".split()
RESNET = ["model=resnet18", "model.width=16", "data=fake_images", "data.samples=96", "data.global_batch_size=16"]
PERCEPTRON = [
    "model=perceptron",
    "data=random_points",
    *SAMPLES,
    "data.global_batch_size=128",
    "data.micro_batch_size=32",
]
SCALED = ["model=scaled", "model.width=96", *PERCEPTRON[1:]]
MODELS = {"gpt": [*BASE, *MODEL], "resnet": [*RESNET, *SAMPLES], "perceptron": PERCEPTRON, "scaled": SCALED}


@dataclass(frozen=True)
class Layout:
    """What train.py would be told, on so many ranks. Keys of `words` are short for parallelism's, data's, model's.
    `model` is a key of MODELS."""

    world: int
    words: str
    model: str = "gpt"

    @property
    def name(self) -> str:
        """For a test."""
        return f"{self.world}: {self.words or 'single'}"

    def config(self) -> Config:
        """Of its run."""
        return _load(self.model, tuple(_key(word) for word in self.words.split()))


@lru_cache
def _load(model: str, overrides: tuple[str, ...]) -> Config:
    if model != "gpt":  # plugins, which a rank does not know either
        import models.mlp
        import models.resnet
        import models.scaled  # noqa: F401
    return load([*MODELS[model], *overrides])


def count(layout: Layout) -> Counted:
    """What a rank of the layout takes in a step."""
    return counted(layout.config())


SHORT = {
    "tp": "parallelism.tensor",
    "pp": "parallelism.pipeline",
    "cp": "parallelism.context",
    "sequence": "parallelism.sequence",
    "schedule": "parallelism.schedule",
    "stages": "parallelism.virtual_stages",
    "zero": "parallelism.zero",
    "copies": "parallelism.dp_replicate",
    "bucket": "parallelism.bucket_layers",
    "prefetch": "parallelism.prefetch",
    "recompute": "parallelism.activation_checkpointing",
    "batch": "data.global_batch_size",
    "micro": "data.micro_batch_size",
    "rows": "data.vocab_size",
    "multiple": "model.vocab_multiple",
    "layers": "model.num_layers",
    "residual": "model.value_residual",
    "tied": "model.tied_embeddings",
    "dropout": "model.dropout",
    "bias": "model.bias",
    "keys": "model.kv_heads",
    "norm": "model.norm",
    "form": "model.form",
    "dtype": "precision",
    "reduce": "precision.reduce",
    "offload": "parallelism.offload",
    "ops": "ops",
    "attention": "ops.attention",
    "optimizer": "optimizer",
    "momentum": "optimizer.momentum",
    "freeze": "optimizer.freeze_step",
    "scaler": "optimizer.var_update_scaler",
    "compression": "parallelism.compression",
    "rank": "parallelism.compression_rank",
    "clipper": "optimizer.local_step_clipper",
    "doubling": "optimizer.local_step_scaler",
    "weights": "parallelism.zeropp.weights",
    "secondary": "parallelism.zeropp.secondary",
    "gradients": "parallelism.zeropp.gradients",
    "node": "parallelism.zeropp.node_size",
}


def _key(word: str) -> str:
    key, _, value = word.partition("=")
    return f"{SHORT[key]}={value}"


QUICK = [
    Layout(2, ""),
    Layout(2, "zero=3 micro=2 recompute=full"),
    Layout(2, "tp=2 sequence=true recompute=selective"),
    Layout(2, "pp=2 schedule=zbv micro=2 tied=false"),
]
OTHERS = [
    Layout(2, "zero=1 micro=1 tied=false"),
    Layout(2, "tp=2 multiple=1 rows=501 dropout=0.1"),
    Layout(2, "pp=2 micro=2"),
    Layout(1, ""),
    Layout(1, "micro=8 ops=reference dropout=0.1"),
    Layout(1, "recompute=full optimizer=sgd layers=8"),
    Layout(1, "recompute=selective attention=sdpa layers=8"),
    Layout(1, "dtype=bf16 micro=8"),
    Layout(2, "zero=2 micro=2"),
    Layout(2, "pp=2 schedule=gpipe micro=2 dropout=0.1"),
    Layout(2, "pp=2 schedule=interleaved_1f1b micro=2 recompute=full"),
    Layout(2, "pp=2 schedule=zero_bubble micro=2"),
    Layout(2, "tp=2 ops=reference bias=false"),
    Layout(4, "zero=3 micro=2 bucket=2"),
    Layout(4, "zero=2 copies=2 micro=1"),
    Layout(4, "zero=3 copies=2 micro=2 tied=false optimizer=sgd momentum=0"),
    Layout(4, "tp=2 zero=2 sequence=true micro=1"),
    Layout(4, "tp=4 sequence=true multiple=1 rows=501 tied=false"),
    Layout(4, "tp=2 pp=2 micro=2 dropout=0.1"),
    Layout(4, "pp=4 micro=1"),
    Layout(4, "pp=2 zero=3 micro=1"),
    Layout(4, "pp=2 zero=1 schedule=interleaved_1f1b micro=1 tied=false"),
    Layout(4, "pp=2 zero=1 schedule=gpipe micro=1"),
    Layout(4, "pp=2 tp=2 schedule=interleaved_1f1b micro=2"),
    Layout(2, "micro=2"),
    Layout(4, "zero=1 micro=1 tied=false"),
    Layout(2, "tp=2 sequence=true residual=true"),
    Layout(4, "pp=2 zero=3 micro=1 residual=true"),
]
# 16 bits with ZeRO, split backward passes, buckets of several blocks, eight ranks: see the document for how they came.
LATER = [
    Layout(2, "zero=2 micro=1 dtype=bf16"),
    Layout(2, "micro=1 dtype=bf16"),
    Layout(2, "zero=3 micro=1 bucket=3 layers=8"),
    Layout(4, "pp=2 zero=2 schedule=zbv micro=1"),
    Layout(4, "pp=2 zero=3 schedule=zbv micro=1"),
    Layout(4, "pp=2 zero=2 schedule=zero_bubble micro=1"),
    Layout(4, "pp=2 zero=3 schedule=zero_bubble micro=1 layers=8 bucket=2"),
    Layout(4, "pp=2 zero=2 schedule=interleaved_1f1b micro=1"),
    Layout(4, "pp=2 tp=2 schedule=zero_bubble sequence=true micro=2"),
    Layout(4, "pp=2 tp=2 schedule=zbv sequence=true micro=2 dtype=bf16"),
    Layout(8, "tp=2 pp=2 zero=3 micro=1 sequence=true"),
    Layout(8, "pp=4 zero=2 schedule=interleaved_1f1b micro=1 layers=8"),
    Layout(8, "tp=2 pp=2 zero=2 schedule=zbv micro=1 layers=8"),
    Layout(8, "pp=2 zero=3 copies=2 schedule=zero_bubble micro=1 layers=8 batch=16"),
    Layout(8, "tp=4 zero=1 micro=1 sequence=true dtype=bf16"),
]
# bf16 without fp32 masters, moments in 8 bits.
HALVES = [
    Layout(1, "dtype=bf16_stochastic micro=8"),
    Layout(2, "zero=2 micro=2 dtype=bf16_stochastic"),
    Layout(2, "micro=1 dtype=bf16_stochastic"),
    Layout(4, "tp=2 zero=3 sequence=true micro=2 dtype=bf16_stochastic"),
    Layout(2, "zero=1 micro=2 optimizer=adamw_8bit"),
    Layout(2, "zero=2 micro=2 dtype=bf16 reduce=compute"),
    Layout(2, "zero=1 micro=4 dtype=bf16 reduce=compute"),
    Layout(4, "zero=3 copies=2 micro=1 dtype=bf16 reduce=compute"),
]
# Apex's levels, fp16, fp8, offload and context parallelism.
OTHER_AXES = [
    Layout(1, "dtype=fp16 micro=8"),
    Layout(1, "dtype=amp_o2 micro=8"),
    Layout(1, "dtype=amp_o1 micro=8"),
    Layout(1, "dtype=fp8 micro=8"),
    Layout(1, "offload=cpu zero=2 micro=2"),
    Layout(2, "zero=2 micro=2 dtype=fp16"),
    Layout(2, "zero=2 micro=2 dtype=amp_o2"),
    Layout(2, "zero=3 micro=2 dtype=amp_o1"),
    Layout(2, "tp=2 sequence=true micro=4 dtype=fp8"),
    Layout(2, "zero=3 micro=2 dtype=fp8"),
    Layout(2, "offload=cpu zero=3 micro=2"),
    Layout(2, "cp=2 micro=4"),
    Layout(2, "cp=2 zero=2 micro=2 dtype=bf16"),
]
# Compressed communication, in steps after the warm-up of 1-bit optimizers.
COMPRESSED = [
    Layout(2, "micro=4 compression=int8"),
    Layout(2, "zero=2 micro=2 compression=int4"),
    Layout(2, "zero=3 micro=2 compression=int8 dtype=bf16"),
    Layout(2, "micro=4 optimizer=onebit_adam freeze=1"),
    Layout(2, "zero=1 micro=2 optimizer=onebit_adam freeze=1"),
    Layout(2, "zero=3 micro=2 weights=int8 secondary=true gradients=int4"),
    Layout(2, "micro=4 compression=powersgd rank=2"),
    Layout(2, "micro=4 optimizer=zero_one_adam freeze=1 clipper=16 doubling=1"),
    Layout(4, "zero=2 copies=2 micro=1 compression=powersgd"),
    Layout(4, "tp=2 micro=4 multiple=1 rows=501 compression=powersgd"),
    Layout(4, "zero=2 copies=2 micro=1 compression=int4"),
    Layout(4, "pp=2 zero=1 micro=1 compression=int8"),
    Layout(4, "tp=2 micro=4 multiple=1 rows=513 compression=int8"),
    Layout(4, "tp=2 zero=1 micro=4 sequence=true optimizer=onebit_adam freeze=1"),
    Layout(4, "pp=2 micro=1 optimizer=onebit_lamb freeze=1"),
    Layout(4, "zero=1 copies=2 micro=1 optimizer=zero_one_adam freeze=1"),
    Layout(4, "zero=3 micro=1 weights=int8 secondary=true gradients=int4 node=2 dtype=bf16"),
    Layout(4, "zero=3 micro=2 gradients=int8 node=1"),
    Layout(4, "zero=3 copies=2 micro=1 weights=int8 secondary=true gradients=int4"),
    Layout(4, "tp=2 zero=3 micro=2 weights=int4 secondary=true gradients=int8 node=1"),
    Layout(4, "pp=2 zero=3 schedule=zbv micro=1 weights=int8 gradients=int4"),
]
LAYOUTS = [*QUICK, *OTHERS, *LATER, *HALVES, *OTHER_AXES]
