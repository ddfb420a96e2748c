"""A run whose text was found otherwise by an earlier gptlite is refused with that reason."""

from pathlib import Path

import pytest

from gptlite.errors import ConfigError


def test_text_that_is_only_now_found_is_the_reason(run, text: Path, tmp_path: Path) -> None:
    """The first version of gptlite did not follow linked folders."""
    corpus, outside = tmp_path / "corpus", tmp_path / "outside"
    for folder in (corpus, outside):
        folder.mkdir()
        (folder / text.name).write_text(text.read_text())
    run("b", f"data.path={corpus}", "trainer.max_steps=2")
    (corpus / "linked").symlink_to(outside)
    with pytest.raises(ConfigError, match=r"the data's train=.*; its linked folder .*/linked is read now"):
        run("b", f"data.path={corpus}", "trainer.max_steps=4")
