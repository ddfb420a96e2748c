"""OpenWebText: the open replication of GPT-2's WebText, 8M documents, 38 GB of text, 9B tokens.

    python data/openwebtext/prepare.py output=FOLDER [tokenizer=tiktoken:gpt2] [max_documents=N] [path=FOLDER]

Documents are streamed by the `datasets` library (pip install datasets) from the hub, or from the .parquet or .jsonl
files in `path`; only the tokens are kept. tokenizer is sentencepiece (vocab_size pieces, trained on the first 32M
characters), byte, char, or any that gptlite preprocess accepts. validation_fraction=0.0005 of the documents, chosen by
their hash, are held out. The recipe tokenizes in one process. For all documents, use several, which can also resume:

    python data/openwebtext/prepare.py output=- > owt.jsonl
    gptlite preprocess input=owt.jsonl tokenizer=tiktoken:gpt2 output=data/owt workers=16
"""

from gptlite.config.command_line import run_tool
from gptlite.satellites.corpus.streaming import Hub, StreamArguments, prepare_stream

HUB = Hub(corpus="openwebtext", repository="Skylion007/openwebtext")


def main(arguments: StreamArguments) -> None:
    """Write the corpus into `output`. Raises ConfigError if it is not available."""
    prepare_stream(HUB, arguments)


if __name__ == "__main__":
    run_tool(main, StreamArguments, __doc__)
