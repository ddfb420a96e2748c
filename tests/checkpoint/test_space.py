"""The space that a checkpoint takes is known before it is written. For layouts of several ranks: test_reshard.py."""

from contextlib import closing
from pathlib import Path

import pytest
from distributed.cells.reshard import SAVED, filled
from distributed.cells.reshard_pairs import BASE
from marking import marked
from run_files import on_disk

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.config import load
from gptlite.config.saved import to_yaml
from gptlite.parallelism.mesh import build_mesh
from gptlite.tokenizers.base import CharTokenizer, Tokenizer

CASES = [
    "precision=bf16 optimizer=adamw",
    "precision=fp32 optimizer=adamw",
    "precision=fp32 optimizer=adamw_8bit",
    "precision=fp32 optimizer=adafactor",
    "precision=bf16 optimizer=muon",
    "precision=fp16 optimizer=lion",
    "precision=amp_o2 optimizer=lamb",
]


@pytest.mark.parametrize(
    ("overrides", "saves"), marked([(c, "async" if n % 2 else "sync") for n, c in enumerate(CASES)], 2, 5)
)
def test_the_estimate_is_at_most_a_tenth_above_what_a_save_takes(tmp_path: Path, overrides, saves):
    config = load([*BASE, "model.d_model=64", *overrides.split(), f"run.dir={tmp_path}", "model.d_ff=256"])
    state = filled(config, mesh := build_mesh(config.parallelism), SAVED)
    tokenizer: Tokenizer = CharTokenizer({chr(character) for character in range(300, 5300)})
    settings = CheckpointConfig(keep=0, async_save=saves == "async")
    with closing(state.loader), closing(Checkpointer(settings, tmp_path, mesh)) as checkpointer:
        arguments = state.tensors(), state.meta(), to_yaml(config), tokenizer
        estimated = checkpointer.size(*arguments)
        folder = checkpointer.save(*arguments, print)
        checkpointer.finish()
    assert on_disk(folder) <= estimated <= 1.1 * on_disk(folder)
    tokenizer.save(tmp_path / "tokenizer")
    assert [path.stat().st_size for path in sorted((tmp_path / "tokenizer").iterdir())] == tokenizer.saved_bytes
