"""Little of the files of model state is in the page cache at any time, and nothing after a step or a save."""

from pathlib import Path

import pytest

from distributed.cells.run import Ranks
from distributed.test_infinite_memory import MODEL, P

MORE = [[], ["ops=reference", "checkpoint.async_save=true"]]


@pytest.mark.slow
@pytest.mark.parametrize("more", MORE, ids=["saved at once", "saved by a thread, norms of torch"])
def test_pages_of_the_files_leave_the_page_cache(tmp_path: Path, more: list[str]):
    """32 blocks: 406 MB of files. A phase has the windows that the kernel reads ahead, of up to 8 MiB on some disks."""
    files = [f"{P}offload=nvme", f"{P}offload_path={tmp_path}", f"{P}offload_buffer_mib=8"]
    own = ["model.num_layers=32", "optimizer.clip_norm=0.5", f"run.dir={tmp_path / 'run'}"]
    with Ranks(1) as ranks:
        ((found, size, block),) = ranks.run(
            "distributed.cells.file_pages:phases",
            [*MODEL, *files, f"{P}offload_parameters=true", *own, *more],
            timeout=300,
        )
    assert size > 120 * block
    assert {phase: most for phase, (most, _) in found.items() if most > size // 5} == {}
    left = {phase: after for phase, (_, after) in found.items()}
    assert left.pop("build") + left.pop("load") <= size // 5
    assert len(left) == 6
    assert set(left.values()) == {0}
