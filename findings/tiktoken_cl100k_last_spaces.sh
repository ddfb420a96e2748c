#!/bin/sh
# tiktoken 0.7.0 and 0.9.0: the same encoding, cl100k_base, gives a text that ends in a line end and spaces other ids.
#
# Between these versions the pattern of cl100k_base was rewritten for speed, and got an alternative for white space at
# the end of a text (`\s++$`) before the one for line ends. "a\n " was cut into "a", "\n" and " "; since then it is cut
# into "a" and "\n ", which may be one token. Text tokenized with both versions, e.g. documents that end so, or a prompt
# before a completion, has two tokenizations under one name. Llama 3 and other models still use the first pattern.
#
# The published table of ranks has to be downloaded, so this script gives the library a small one: all bytes, and the
# pair "\n ". Pattern and encoder are the library's own. Seen with Python 3.11 on 2026-11-28.
# Exit 0: as described; 1: the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 0.7.0 0.9.0; do
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "tiktoken==$version"
    "$folder/venv/bin/python" - "$version" <<'PYTHON'
import sys

import tiktoken
from tiktoken_ext import openai_public

ranks = {bytes([byte]): byte for byte in range(256)} | {b"\n ": 256}
openai_public.load_tiktoken_bpe = lambda *_, **__: ranks
constructed = openai_public.cl100k_base()
encoding = tiktoken.Encoding(
    "cl100k_base", pat_str=constructed["pat_str"], mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257}
)
found = {text: encoding.encode(text) for text in ("a\n ", "a\n b")}
print(f"tiktoken {sys.argv[1]}: {found}")
last = {"0.7.0": [97, 10, 32], "0.9.0": [97, 256]}[sys.argv[1]]
if found != {"a\n ": last, "a\n b": [97, 10, 32, 98]}:
    raise SystemExit("the behaviour has changed")
PYTHON
done
