"""The source tree on the path, without an install: every package of it imports, its data files are found."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in f"{finder} {type(finder)}".lower()]
import gptlite.kernels.units, gptlite.recipes.shakespeare
from gptlite.config.schema import CONF_DIR
places = gptlite.kernels.units.__file__, CONF_DIR / "config.yaml", *gptlite.recipes.shakespeare.__path__
print(*places, sep="\\n")
"""


def test_the_packages_beside_the_source_are_found(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    expected = ROOT / "kernels/units.py", ROOT / "conf/config.yaml", ROOT / "data/shakespeare"
    assert run.stdout.splitlines() == [str(path) for path in expected]
