"""A small tokenizer for any chat template: bytes with a few merges, and the template's own special tokens.

As in most real ones two line breaks are one token: where a prompt ends between them, its last token melts into the
answer's first.
"""

import re
from collections.abc import Iterable
from typing import Any

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜]{1,40}｜>|<(?:start|end)_of_(?:turn|image|role)>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|THINK|IMG|CALL_ID)\]"
    r"|\]~!b\[|\]~b\]|\[e~\[|\[gMASK\]|<sop>|<bos>|<eos>|</?s>|<SPECIAL_\d+>|\[\|[a-z]+\|\]|<seed:[a-z]+>"
)
_PLAIN = re.compile(r"</?think>|</?tool_call>|</?tool_response>|</?arg_key>|</?arg_value>|</?minimax:tool_call>")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MERGES = [("Ċ", "Ċ"), ("Ġ", "t"), ("t", "h"), ("i", "n"), ("e", "r")]


def find_special(text: str) -> set[str]:
    """Return the special tokens that a template or a program names."""
    return set(_SPECIAL.findall(text))


def make_tokenizer(template: str, *, bos: str | None, eos: str, more: Iterable[str] = ()) -> Any:
    """Return a tokenizer with a template; `more` are special tokens that the template has in parts only."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in _MERGES:
        vocabulary[left + right] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    special = {*find_special(template), *more, eos} | ({bos} if bos else set())
    plain = {*_PLAIN.findall(template), "<think>", "</think>", "<tool_call>", "</tool_call>"} - special
    plain |= {"<tool_response>", "</tool_response>"} - special
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(special)])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in sorted(plain)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer
