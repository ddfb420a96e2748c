#!/bin/sh
# transformers 5.24.0: AutoTokenizer loads a folder without any tokenizer file, and every text is encoded as no ids.
#
# A folder that holds a model, but no tokenizer.json, vocab.json or tokenizer.model, used to be an OSError. Now the class
# of the model type is built with an empty vocabulary, without an error or a warning: GPT2Tokenizer, Qwen2Tokenizer and
# GPTNeoXTokenizer of one or two ids, for which encode("hello") is []. A Llama folder is still refused. A pipeline that
# copies a model's weights and configuration alone so trains and evaluates on nothing; whoever writes such a folder can
# name a tokenizer_class that does not exist in tokenizer_config.json, which is a ValueError.
# Seen with Python 3.11 on 2026-11-28. Exit 0: as described; 1: the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
import pathlib

from transformers import AutoTokenizer


def load(model_type, **beside):
    folder = pathlib.Path(f"{model_type}-{len(beside)}")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if beside:
        (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    try:
        found = AutoTokenizer.from_pretrained(folder)
    except ValueError as error:
        return f"ValueError: {str(error).splitlines()[0]}"
    return f"{type(found).__name__} of {len(found)} ids, hello is {found.encode('hello')}"


said = {name: load(name) for name in ("gpt2", "qwen3", "olmoe", "llama")}
named = load("gpt2", tokenizer_class="NoSuchTokenizer")
for name, each in [*said.items(), ("gpt2 with an unknown tokenizer_class", named)]:
    print(f"{name}: {each}")
empty = all("hello is []" in said[name] for name in ("gpt2", "qwen3", "olmoe"))
if not empty or "ValueError" not in said["llama"] or "ValueError" not in named:
    raise SystemExit("the behaviour has changed")
PYTHON
