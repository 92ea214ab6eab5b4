"""Stop strings that are special tokens: the text that they are looked for in leaves these out."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from millrace.errors import InvalidSpecError, Violation
from millrace.inference.http.schema import SamplingBody

S = TypeVar("S", bound=SamplingBody)


def special_texts(tokenizer: Any) -> Mapping[str, int]:
    """The special tokens of a tokenizer of transformers: what they are written as, and their ids."""
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {text: number for text, number in added.items() if text}


def separated(
    stop: str | Sequence[str] | None, specials: Mapping[str, int], *, field: str = "stop"
) -> tuple[list[str], list[int]]:
    """The stop strings that can be found in a text without special tokens, and the ids of those that are one.

    InvalidSpecError for a string that has one and more: neither its text nor an id would ever match.
    """
    texts: list[str] = []
    ids: list[int] = []
    for text in [stop] if isinstance(stop, str) else stop or ():
        if text in specials:
            ids.append(specials[text])
        elif inside := next((special for special in specials if special in text), None):
            message = (
                f"{text!r} would never match: the text leaves out the special token {inside!r}; set "
                "skip_special_tokens = false, or name the token in stop_token_ids"
            )
            raise InvalidSpecError([Violation(field=field, message=message)], reason="REQUEST_INVALID")
        else:
            texts.append(text)
    return texts, ids


def with_stop_tokens(sampling: S, tokenizer: Any | None) -> S:
    """What a request asks for, with special tokens by their ids where the text leaves them out."""
    if not sampling.stop or not sampling.skip_special_tokens or tokenizer is None:
        return sampling
    texts, ids = separated(sampling.stop, special_texts(tokenizer))
    if not ids:
        return sampling
    changes = {"stop": texts or None, "stop_token_ids": [*(sampling.stop_token_ids or ()), *ids]}
    return sampling.model_copy(update=changes)
