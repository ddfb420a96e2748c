"""OpenWebText: the open copy of GPT-2's WebText, 8M documents, 38 GB of text, 9B tokens.

    python data/openwebtext/prepare.py output=FOLDER [tokenizer=tiktoken:gpt2] [max_documents=N] [path=FOLDER]

Documents are streamed by the `datasets` library (pip install datasets) from the hub, or from the .parquet or
.jsonl files in `path`; nothing but the tokens is kept. tokenizer is sentencepiece (vocab_size pieces, trained on the
first 32M characters), byte, char, or whatever gptlite preprocess takes. validation_fraction=0.0005 of the documents,
by their hash, are held out. One process tokenizes; for all of it, let several, and restart where it stopped:

    python data/openwebtext/prepare.py output=- > owt.jsonl
    gptlite preprocess input=owt.jsonl tokenizer=tiktoken:gpt2 output=data/owt workers=16
"""

from gptlite.config.command_line import run_tool
from gptlite.data.streaming import Hub, StreamArguments, prepare_stream

HUB = Hub(corpus="openwebtext", repository="Skylion007/openwebtext")


def main(arguments: StreamArguments) -> None:
    """Writes the corpus into `output`. Raises ConfigError if it cannot be had."""
    prepare_stream(HUB, arguments)


if __name__ == "__main__":
    run_tool(main, StreamArguments, __doc__)
