"""Train a GPT: `python train.py [GROUP=PRESET] [KEY=VALUE]`. The same as the installed command `gptlite`."""

from gptlite.cli import main

if __name__ == "__main__":
    main()
