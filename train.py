"""Train a GPT: `python train.py [GROUP=PRESET] [KEY=VALUE]`. The same as the installed command `gptlite train`."""

import os
import sys

if "TORCHELASTIC_RUN_ID" in os.environ:
    from gptlite.satellites.elastic.proxy import go_on

    go_on()  # if this worker is of a restart of an elastic run, which needs none of the imports below
try:
    from gptlite.commands.train import main
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

if __name__ == "__main__":
    main()
