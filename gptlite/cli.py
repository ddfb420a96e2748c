"""The command `train.py`: compose, check, launch. Each kind of failure has its exit code, and prints one line."""

import os
import sys
import traceback
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gptlite.config import CONF_DIR, register, saved_overrides, typed
from gptlite.config_errors import refusals
from gptlite.errors import ConfigError

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


@hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")
def run(raw: DictConfig) -> None:
    """One job: of a single run or, under --multirun, of a sweep."""
    raw.run.overrides = list(HydraConfig.get().overrides.task)
    config = typed(raw)
    from gptlite.launch import launch  # torch comes with it: not before the configuration stands

    code = launch(config)
    if code:
        sys.exit(code)


def main() -> NoReturn:
    """Runs the command line and exits with DESIGN's codes: 0 done, 2 refused, 128+signal stopped, 1 anything else."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print, and we print one line of it
    try:
        with refusals():
            sys.argv[1:1] = saved_overrides(sys.argv[1:])
            run()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_FAILED)
    sys.exit(0)
