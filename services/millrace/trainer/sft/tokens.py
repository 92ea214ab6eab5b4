"""A text as tokens, cut where an engine begins to sample.

An engine gets a prompt as tokens of its own. Where the prompt's last token melts into what follows ("\\n" and "\\n" are
one token in many vocabularies), the tokens of the whole text begin with other ones: then the rest is tokenised apart.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from millrace.policies.stops import common_prefix
from millrace.trainer.sft.rendering import BadRowError


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of the text from character `start` on; `ends[i]` is the character behind token i, None without offsets.

    They were tokenised behind `anchor`.
    """

    start: int
    token_ids: list[int]
    ends: list[int] | None
    anchor: str = ""


class TextTokens:
    """The tokens of a text: `token_ids`."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        """Tokenise the text; BadRowError if it is none."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRowError(f"{text[error.start : error.end]!r} is half of a surrogate pair, and no text") from error
        self._tokenizer = tokenizer
        self._text = text
        self._prompts: list[list[int]] = []
        whole = self._tokenized(text, start=0)
        assert whole is not None, "nothing stands before it"
        self._pieces = [whole]

    @property
    def token_ids(self) -> list[int]:
        """Of all of the text."""
        return [token for piece in self._pieces for token in piece.token_ids]

    def before(self, end: int) -> int:
        """How many tokens lie before a character; a token across it lies behind it."""
        piece = next(piece for piece in reversed(self._pieces) if piece.start <= end)
        count = sum(len(each.token_ids) for each in self._pieces[: self._pieces.index(piece)])
        if piece.ends is not None:
            return count + bisect_right(piece.ends, end)
        part = self._tokenized(self._text[piece.start : end], start=piece.start, anchor=piece.anchor)
        return count + (0 if part is None else common_prefix(part.token_ids, piece.token_ids))

    def behind_prompt(self, end: int) -> int:
        """How many tokens the prompt has that is the text up to a character, tokenised as an engine does.

        Where the whole's tokens do not begin with it, the text behind it is tokenised apart. BadRowError if no sequence
        of tokens has this prompt, and those that were asked for before, as engines make them.
        """
        prompt = self._encoded(self._text[:end])
        if self.token_ids[: len(prompt)] != prompt:
            is_one = len(self._pieces) == 1 and all(prompt[: len(each)] == each for each in self._prompts)
            behind = self._apart(prompt, end) if is_one else None
            if behind is None:
                raise BadRowError(self._melted(prompt, end))
            before = self._tokenized(self._text[:end], start=0)
            assert before is not None, "nothing stands before it"
            self._pieces = [before, behind]
        self._prompts.append(prompt)
        return len(prompt)

    def _apart(self, prompt: Sequence[int], end: int) -> _Piece | None:
        """The text behind a prompt by itself; None if it could not be sampled so.

        Some tokenizers put a space before a text: then it is tokenised behind something else, which is taken away.
        """
        whole = self._decoded(self._pieces[0].token_ids)
        for anchor in ("", self._tokenizer.eos_token or "", "\n", "a"):
            piece = self._tokenized(self._text[end:], start=end, anchor=anchor)
            if piece is not None and self._decoded([*prompt, *piece.token_ids]) == whole:
                return piece
        return None

    def _tokenized(self, text: str, *, start: int, anchor: str = "") -> _Piece | None:
        """A text behind an anchor; None if the anchor is no beginning of the tokens."""
        (token_ids, ends), lead = self._measured(anchor + text), self._encoded(anchor) if anchor else []
        if token_ids[: len(lead)] != lead:
            return None
        if ends is not None:
            ends = [end - len(anchor) + start for end in ends[len(lead) :]]
        return _Piece(start, token_ids[len(lead) :], ends, anchor)

    def _measured(self, text: str) -> tuple[list[int], list[int] | None]:
        """The tokens of a text, and the character behind each; None where the tokenizer does not know it."""
        if not getattr(self._tokenizer, "is_fast", False):
            return self._encoded(text), None
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(accumulate((end for _, end in encoded["offset_mapping"]), max))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _melted(self, prompt: Sequence[int], end: int) -> str:
        """What a row is told whose prompts no sequence of tokens has."""
        shown, at = self._text[max(end - 20, 0) : end], common_prefix(prompt, self.token_ids)
        if not self._prompts:
            return f"an engine begins to sample behind {shown!r}, but the text there cannot be tokenised by itself"
        sampled, given = (self._words(each[max(at - 1, 0) : at + 2]) for each in (self.token_ids, prompt))
        return (
            f"before a later turn (behind {shown!r}) an engine is given the tokens {given}, where it samples {sampled} "
            "in the turn itself: one row cannot have both"
        )

    def _words(self, token_ids: Sequence[int]) -> str:
        return " ".join(repr(self._decoded([token])) for token in token_ids)
