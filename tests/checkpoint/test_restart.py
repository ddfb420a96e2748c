"""A killed conversion is restarted by the same command, and leaves nothing behind."""

import signal
from pathlib import Path

import forked
import pytest
from checkpoint.huggingface_models import committed, theirs
from marking import marked
from run_files import snapshot

KILLED = """
import os, signal, sys
from gptlite.satellites.checkpoint_tool.command import main
rename, last = os.rename, sys.argv.pop(1)
def killed(old, new, **given):
    if os.path.basename(new) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(old, new, **given)
os.rename = killed
main()
"""


@pytest.mark.parametrize("command", marked(["export", "import", "upcycle"], quick=1, slow=2))
def test_a_killed_conversion_is_started_over(tmp_path: Path, command):
    source = theirs(tmp_path / "theirs") if command == "import" else committed(tmp_path)("model.bias=false")[0]
    target, last = tmp_path / "new", "new" if command == "export" else "checkpoints"
    died = forked.run("-c", KILLED, last, command, str(source), str(target), folder=tmp_path)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (tmp_path / "new" / "checkpoints").exists()
    assert list(tmp_path.rglob(".*.partial/whole/*"))
    for number, said in enumerate(("", "new exists; nothing is overwritten, give a new folder\n")):
        done = forked.run("-c", KILLED, "-", command, str(source), str(target), folder=tmp_path)
        assert done.returncode == 2 * number, done.stderr
        assert done.stderr.endswith(said)
        assert list(tmp_path.rglob(".*.partial")) == []
    whole = forked.run("-c", KILLED, "-", command, str(source), str(tmp_path / "other"), folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert snapshot(target).keys() == snapshot(tmp_path / "other").keys()
