"""FineWeb: English web text from Common Crawl, 15T tokens, and samples of it.

    python data/fineweb/prepare.py output=FOLDER [sample=sample-10BT] [tokenizer=tiktoken:gpt2] [max_documents=N]

sample is a configuration of HuggingFaceFW/fineweb: sample-10BT (15M documents, 28 GB to download), sample-100BT,
sample-350BT, one crawl such as CC-MAIN-2024-10, or default for all. Documents are streamed by the `datasets` library
(pip install datasets), or read from the .parquet or .jsonl files in `path`; only the tokens are kept. tokenizer
is sentencepiece (vocab_size pieces, trained on the first 32M characters), byte, char, or any that
gptlite preprocess accepts. validation_fraction=0.0005 of the documents, chosen by their hash, are held out. The recipe
tokenizes in one process. For a whole sample, use several processes, which can also resume:

    python data/fineweb/prepare.py output=- > fineweb.jsonl
    gptlite preprocess input=fineweb.jsonl tokenizer=tiktoken:gpt2 output=data/fineweb workers=16
"""

from gptlite.config.command_line import run_tool
from gptlite.satellites.corpus.streaming import Hub, StreamArguments, prepare_stream

HUB = Hub(corpus="fineweb", repository="HuggingFaceFW/fineweb", config="sample-10BT")


def main(arguments: StreamArguments) -> None:
    """Write the corpus into `output`. Raises ConfigError if it is not available."""
    prepare_stream(HUB, arguments)


if __name__ == "__main__":
    run_tool(main, StreamArguments, __doc__)
