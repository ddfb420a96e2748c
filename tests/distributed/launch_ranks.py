"""`python launch_ranks.py WORLD BEHAVIOUR KEY=VALUE...`: train.py on several ranks, but for training (test_launch)."""

import sys
import time
from pathlib import Path

from gptlite.commands.train import guarded
from gptlite.config import load
from gptlite.launch.elastic import run_ranks

if __name__ == "__main__":
    config = load(sys.argv[3:])
    worker = (str(Path(__file__).with_name("launch_rank.py")), sys.argv[2])
    sys.exit(guarded(lambda: run_ranks(config, int(sys.argv[1]), time.monotonic(), worker)))
