"""Runs of the ResNet example, narrow enough for a test."""

import sys
from importlib import import_module
from pathlib import Path

from run_files import without_plots

from gptlite.config import load

# The root is on the path for these imports alone: its packages have the names of folders in tests/.
ROOT = str(Path(__file__).parents[2])
sys.path.insert(0, ROOT)
for name in ("resnet", "resnet_layers", "mlp", "hf_causal_lm", "hf_t5"):
    import_module(f"examples.{name}")
sys.path.remove(ROOT)

RUN = """
model=resnet18 model.blocks=1 model.width=8 data=fake_images data.samples=96 data.global_batch_size=16
optimizer.lr=1e-3 schedule=constant schedule.warmup_steps=0 precision=fp32 run.name=resnet
trainer.log_interval=1 trainer.eval_interval=2 trainer.eval_samples=10 checkpoint.interval=0
""".split()


def config_of(*overrides: str):
    """Return the configuration of a run, by default of four steps."""
    length = [] if any(each.startswith("trainer.max_epochs=") for each in overrides) else ["trainer.max_steps=4"]
    return load([*RUN, *length, *overrides])


def train(folder: str, *overrides: str) -> int:
    """Train on every rank of a world."""
    from gptlite.start.pretrain import pretrain

    with without_plots():
        return pretrain(config_of(f"run.dir={folder}", *overrides)).exit_code
