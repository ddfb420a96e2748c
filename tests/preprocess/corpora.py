"""Made-up corpora, and preprocessing them in this process's children."""

import json
import random
from dataclasses import replace
from pathlib import Path

from run_files import snapshot

from gptlite.commands.preprocess import Arguments
from gptlite.data.indexed import IndexedDataset
from gptlite.satellites.data_tool.verify import verify
from gptlite.satellites.preprocess.run import PreprocessResult, preprocess
from gptlite.satellites.preprocess.settings import make_settings
from gptlite.tokenizers.base import load_tokenizer
from gptlite.tokenizers.find import find_tokenizer

WORDS = "the quick brown fox jumps over dogs 漢字 naïve 😀 \u0000 it's 12345 hello,world \n \n\n \t  ▁ a".split(" ")


def made_up(seed: int, count: int) -> list[str]:
    """Documents of 1 to 400 words, no two alike."""
    rng = random.Random(seed)
    return [f"{n} " + " ".join(rng.choices(WORDS, k=rng.randrange(1, 400))) for n in range(count)]


def as_jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts)).encode()


def prepare(input: object, output: Path, tokenizer: str = "byte", **options) -> PreprocessResult:
    """`preprocess` with the tool's defaults."""
    given = {"validation_fraction": 0.2, "on_error": "error", "overwrite": False, "workers": 0} | options
    log, found = given.pop("log", lambda _: None), find_tokenizer(tokenizer)
    arguments = Arguments(str(input), tokenizer, str(output), **given)
    settings = replace(make_settings(arguments), tokenizer=found.fingerprint)
    how = {key: getattr(arguments, key) for key in ("workers", "on_error", "overwrite")}
    return preprocess(settings, found, output, **how, log=log)


def read_documents(folder: Path, split: str) -> list[str]:
    """The texts of a prepared folder. Each ends with its end-of-document token, which is nowhere else."""
    tokenizer, dataset = load_tokenizer(folder / "tokenizer"), IndexedDataset(folder / split)
    verify(dataset)
    found = [dataset.document(n).tolist() for n in range(dataset.num_documents)]
    assert all(ids.index(tokenizer.eod) == len(ids) - 1 for ids in found)
    return [tokenizer.decode(ids) for ids in found]


def tree(folder: Path) -> dict[str, str]:
    """All files below a folder, but for preprocess.json, which names the input's files and times."""
    return {name: digest for name, digest in snapshot(folder).items() if name != "preprocess.json"}
