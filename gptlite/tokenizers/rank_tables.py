"""Published tables of ranks, known by their number of ranks: patterns and special tokens, which the files lack.

A table that is read with another pattern, or whose special tokens get other ids, encodes text differently, without any
error. Sources: `tiktoken_ext/openai_public.py` of tiktoken 0.14, Qwen's `tokenization_qwen.py`, and Meta's
`llama_models` (Llama 3 and 4).
"""

from __future__ import annotations

from dataclasses import dataclass

END = "<|endoftext|>"
LLAMA_END = "<|end_of_text|>"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s"
)
# Unlike tiktoken's pattern of today, it cuts white space at the end of a text after its last line end.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Table:
    """Complement of a file of ranks: its pattern, its special tokens by id, and the one that ends documents.

    `size`: vocabulary size, if above that of the named tokens; the ids that are left have reserved tokens.
    """

    pattern: str
    named: dict[int, str]
    size: int = 0
    eod: str = END

    def special(self, used: set[int]) -> dict[str, int]:
        """Return the ids of the special tokens. `used`: the ids of the ranks."""
        named = dict(self.named)
        for token in range(min(named, default=0), self.size):
            if token not in used:
                named.setdefault(token, f"<|reserved_{token - min(self.named)}|>")
        return {name: token for token, name in named.items()}


_ROLES = {6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
_LLAMA_3 = {0: "<|begin_of_text|>", 1: LLAMA_END, **_ROLES}
_LLAMA_4 = {0: "<|begin_of_text|>", 1: LLAMA_END, 5: "<|header_start|>", 6: "<|header_end|>", 8: "<|eot|>"}
_FILL_IN = {100258: "<|fim_prefix|>", 100259: "<|fim_middle|>", 100260: "<|fim_suffix|>", 100276: "<|endofprompt|>"}


def _after(first: int, named: dict[int, str]) -> dict[int, str]:
    return {first + place: name for place, name in named.items()}


TABLES = {
    50256: Table(GPT2, {50256: END}),  # GPT-2 and r50k_base
    50280: Table(GPT2, {50256: END}),  # p50k_base, whose ranks leave out 50,256
    100256: Table(CL100K, {100257: END, **_FILL_IN}),
    128000: Table(LLAMA_3, _after(128000, _LLAMA_3), 128256, LLAMA_END),
    151643: Table(QWEN, {151643: END, 151644: "<|im_start|>", 151645: "<|im_end|>"}),
    199998: Table(O200K, {199999: END, 200018: "<|endofprompt|>"}),
    200000: Table(O200K, _after(200000, _LLAMA_4), 202048, LLAMA_END),
}
