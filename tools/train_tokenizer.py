"""`gptlite train-tokenizer` from a checkout; see `--help`."""

from gptlite.commands.train_tokenizer import main

if __name__ == "__main__":
    main()
