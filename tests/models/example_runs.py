"""Short runs of the examples of models and data of one's own, by name."""

from pathlib import Path

from models.resnet import RUN as RESNET
from run_files import read_metrics, without_plots

from gptlite.config import load

COMMON = """
data.global_batch_size=16 schedule=constant schedule.warmup_steps=0 precision=fp32 trainer.log_interval=1
trainer.max_steps=3 trainer.eval_interval=2 trainer.eval_samples=16 checkpoint.interval=0
""".split()
LLAMA = "hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1"
T5 = "d_model: 16, d_kv: 8, d_ff: 32, num_layers: 2, num_heads: 2, dropout_rate: 0"
TOKENS = ["data=synthetic", "data.vocab_size=64", "data.num_tokens=4000", "data.sequence_length=16"]
RUNS = {
    "resnet": [*RESNET, "trainer.max_steps=3"],
    "mlp": [*COMMON, "run.name=mlp", "model=mlp", "model.width=32", "data=clothes"],
    "hf": [*COMMON, *TOKENS, "run.name=hf", "model=hf", f"model.settings={{{LLAMA}, tie_word_embeddings: true}}"],
    "t5": [*COMMON, "run.name=t5", "model=t5", f"model.settings={{{T5}}}", "data=reversed", "optimizer.lr=0.01"],
}


def config_of(name: str, *overrides: str):
    """Return the configuration of an example's run."""
    return load([*RUNS[name], *overrides])


def train(name: str, folder: str, *overrides: str) -> int:
    """Train on every rank of a world."""
    from gptlite.start.pretrain import pretrain

    with without_plots():
        return pretrain(config_of(name, f"run.dir={folder}", *overrides)).exit_code


def curve(folder: Path) -> list[float]:
    """What a run's steps and evaluations came to."""
    rows = read_metrics(folder)
    return [row[key] for row in rows for key in ("loss", "grad_norm", "val_loss", "val_accuracy") if key in row]


def correct(folder: Path) -> list[int]:
    """Correct answers in each step's batch of 16."""
    counts = [16 * row["train_accuracy"] for row in read_metrics(folder) if "loss" in row]
    assert all(count == int(count) for count in counts)
    return [int(count) for count in counts]
