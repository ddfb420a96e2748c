"""Train a GPT: `python train.py [GROUP=PRESET] [KEY=VALUE]`. The same as the installed command `gptlite train`."""

import sys

try:
    from gptlite.commands.train import main
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

if __name__ == "__main__":
    main()
