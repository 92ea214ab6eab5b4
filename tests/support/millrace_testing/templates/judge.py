"""Samples that two programs make of one conversation, and why they differ.

A difference has one of `CAUSES`, each with a check of its own that asks the template and the tokenizer; what none
recognises is `UNEXPLAINED`.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from millrace.models.vocabulary import TEMPLATE_ERRORS
from millrace.policies.stops import common_prefix
from millrace.trainer.sft.rendering import Conversation, render, with_calls

EQUAL, UNEXPLAINED = "equal", "unexplained"
CAUSES = {
    "both refuse": "neither makes a sample of the row",
    "the template refuses": "the chat template raises; the peer writes something else",
    "rewritten": "the row does not begin as the prompt that an engine is given, and no marker says what was sampled: "
    "refused here, trained by the peer",
    "melts": "a turn has other tokens where it is context than where it is sampled: refused here, trained by the peer",
    "not written": "the template leaves out text, a call or reasoning: refused here; the peer trains the rest",
    "peer refuses": "the peer raises, or finds nothing to train on",
    "other text": "the peer writes another text than the template that the engine uses",
    "apart": "Millrace tokenises the answer apart from the prompt, where they melt into one token",
    "header": "the peer trains tokens of the prompt that the engine is given",
    "behind the stop": "the peer trains what the template writes behind the token that ends the turn",
    "another stop": "if the template writes no stop, Millrace takes the next role's token, the peer the tokenizer's",
    "another end": "the peer trains the token that opens the next role as the end of a turn, at which no engine stops",
    "no beginning": "the peer does not train the space with which a turn begins behind the prompt of an engine",
    "no stop": "the peer does not train the token that ends a turn, or there is none in its row",
    "history": "the peer trains, of an earlier turn, what the template wrote otherwise when it was sampled",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, and which of them are trained on; `refusal` instead says why there are none."""

    token_ids: Sequence[int] = ()
    mask: Sequence[bool] = ()
    refusal: str | None = None
    is_marked: bool = False


class Judge:
    """Finds why a peer's sample of a conversation is another one than Millrace's."""

    def __init__(self, tokenizer: Any, stops: Set[int], conversation: Conversation, own: Sample) -> None:
        """Take `tokenizer`, which has the template, and `stops`, the tokens that end a turn under it."""
        self._tokenizer, self._stops, self._conversation, self._own = tokenizer, stops, conversation, own

    def causes(self, theirs: Sample) -> list[str]:
        """Return the causes of the difference, `EQUAL` alone, or `UNEXPLAINED` among them."""
        own = self._own
        if own.refusal is not None:
            return [self._of_refusal(own.refusal, theirs)]
        if theirs.refusal is not None or not any(theirs.mask):
            return ["peer refuses"]
        decode = self._tokenizer.decode
        length = common_prefix(own.token_ids, theirs.token_ids)
        rest = (list(own.token_ids[length:]), list(theirs.token_ids[length:]))
        if rest == ([], []):
            return sorted(self.of_masks(theirs)) or [EQUAL]
        if not rest[1] and len(rest[0]) == 1 and rest[0][0] in self._stops:
            cut = Sample(own.token_ids[:length], own.mask[:length])
            return sorted({"no stop", *Judge(self._tokenizer, self._stops, self._conversation, cut).of_masks(theirs)})
        if len(rest[0]) == len(rest[1]) == 1 and {rest[0][0], rest[1][0]} <= self._stops:
            ours = Judge(
                self._tokenizer, self._stops, self._conversation, Sample(own.token_ids[:length], own.mask[:length])
            )
            return sorted({"another stop", *ours.of_masks(Sample(theirs.token_ids[:length], theirs.mask[:length]))})
        if decode(own.token_ids) == decode(theirs.token_ids):
            return ["apart"] if self._has_same_turns(theirs) else [UNEXPLAINED]
        if self._is_template(theirs):
            return [UNEXPLAINED]
        return ["other text"]

    def _of_refusal(self, refusal: str, theirs: Sample) -> str:
        """Return the kind of a refusal, if the template does what it says."""
        if theirs.refusal is not None or not any(theirs.mask):
            return "both refuse"
        outcome = outcome_of(self._own)
        proofs = {
            "the template refuses": self._raises,
            "not written": self._is_lost,
            "rewritten": self._is_rewritten,
            "melts": self._melts,
        }
        return outcome if outcome in proofs and proofs[outcome]() else UNEXPLAINED

    def _text(self, count: int | None = None, *, opens_turn: bool = False) -> str | None:
        return _rendered(self._tokenizer, self._conversation, count, opens_turn=opens_turn)

    def _raises(self) -> bool:
        """Return whether the template raises for the conversation, with arguments of calls as objects or as text."""
        for given in with_calls(self._conversation):
            try:
                render(self._tokenizer, given)
            except TEMPLATE_ERRORS:
                return True
        return False

    def _is_lost(self) -> bool:
        """Return whether the template leaves out words of a message, or the numbers of a call."""
        text = self._text() or ""
        words = {
            word
            for message in self._conversation.messages
            for word in re.findall(r"\w+", f"{message['content']} {message.get('reasoning_content', '')}")
        }
        numbered = replace(self._conversation, messages=[_numbered(each) for each in self._conversation.messages])
        numbers = sum(bool(message.get("tool_calls")) for message in self._conversation.messages)
        shown = (_rendered(self._tokenizer, numbered) or "").count(_NUMBER)
        return not words <= set(re.findall(r"\w+", text)) or shown < numbers

    def _is_rewritten(self) -> bool:
        """Return whether the whole begins otherwise than a prompt within it, or than a turn when it was the last
        one.
        """
        whole = self._text() or ""
        turns = [index for index, message in enumerate(self._conversation.messages) if message["role"] == "assistant"]
        closed = [text and text.rstrip() for text in map(self._text, (index + 1 for index in turns))]
        beginnings = [*closed, *(self._text(index, opens_turn=True) for index in turns)]
        return not all(text is not None and whole.startswith(text) for text in beginnings)

    def _melts(self) -> bool:
        """Return whether a prompt within the whole has other tokens than the whole, where the text is the same."""
        whole, tokenizer = self._text() or "", self._tokenizer
        token_ids = list(tokenizer(whole, add_special_tokens=False)["input_ids"])
        return any(
            whole.startswith(tokenizer.decode(prompt)) and token_ids[: len(prompt)] != prompt
            for _, prompt in self._prompts
        )

    def _has_same_turns(self, theirs: Sample) -> bool:
        """Return whether a peer trains each of our stretches, at least."""
        own, other = ([self._words(sample, run) for run in runs(sample.mask)] for sample in (self._own, theirs))
        return len(own) == len(other) and all(left in right for left, right in zip(own, other, strict=True))

    def _words(self, sample: Sample, run: tuple[int, int]) -> str:
        return self._tokenizer.decode(sample.token_ids[slice(*run)]).strip()

    def _is_template(self, theirs: Sample) -> bool:
        """Return whether a peer's tokens are the template's text: then ours are not, and something is wrong."""
        return self._tokenizer.decode(theirs.token_ids) == self._text()

    def of_masks(self, theirs: Sample) -> set[str]:
        """Return the causes of tokens that just one of the two trains, where the tokens are the same."""
        ids, own, other = self._own.token_ids, self._own.mask, theirs.mask
        found: set[str] = set()
        for start, end in runs([b and not a for a, b in zip(own, other, strict=True)]):
            found.add(self._of_theirs(ids, own, start, end))
        for start, end in runs([a and not b for a, b in zip(own, other, strict=True)]):
            found.add(self._of_ours(ids, own, start, end))
        return found

    def _of_theirs(self, ids: Sequence[int], own: Sequence[bool], start: int, end: int) -> str:
        """Return why a peer trains tokens that Millrace does not."""
        if start and own[start - 1] and ids[start - 1] in self._stops:
            return "behind the stop"
        if any(
            first <= start and end <= len(prompt) and list(ids[:end]) == prompt[:end] for first, prompt in self._prompts
        ):
            return "header"
        if end - start == 1 and start and own[start - 1] and self._opens_role(ids[start]):
            return "another end"
        if self._own.is_marked:
            return "history"
        return UNEXPLAINED

    def _of_ours(self, ids: Sequence[int], own: Sequence[bool], start: int, end: int) -> str:
        """Return why Millrace trains tokens that a peer does not."""
        if end - start == 1 and ids[start] in self._stops and not any(own[end : end + 1]):
            return "no stop"
        is_first = any(list(ids[:start]) == prompt for _, prompt in self._prompts)
        is_blank = not self._tokenizer.decode(ids[start:end]).strip()
        return "no beginning" if is_first and is_blank else UNEXPLAINED

    def _opens_role(self, token: int) -> bool:
        """Return whether a token is a special one at which no engine stops."""
        added = self._tokenizer.added_tokens_decoder
        return token in added and added[token].special and token not in self._stops

    @functools.cached_property
    def _prompts(self) -> list[tuple[int, list[int]]]:
        """Return the tokens that an engine is given to sample each turn, with the place where its header begins."""
        found = []
        for index, message in enumerate(self._conversation.messages):
            closed, opened = self._text(index), self._text(index, opens_turn=True)
            if message["role"] == "assistant" and opened is not None:
                tokens = [
                    list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
                    for text in (closed or "", opened)
                ]
                found.append((common_prefix(*tokens), tokens[1]))
        return found


def _rendered(
    tokenizer: Any, conversation: Conversation, count: int | None = None, *, opens_turn: bool = False
) -> str | None:
    """Return what the template makes of the first messages; None if it takes no such conversation."""
    for given in with_calls(conversation):
        with contextlib.suppress(*TEMPLATE_ERRORS):
            return render(tokenizer, given, count, opens_turn=opens_turn)
    return None


def runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the stretches of set flags: first position and the position after the last."""
    start = None
    for at, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = at
        elif not flag and start is not None:
            yield start, at
            start = None


_NUMBER = "770177"


def _numbered(message: Any) -> Any:
    """Return a message whose calls have a number that stands nowhere else."""
    calls = [
        {**call, "function": {**call["function"], "arguments": {"a": int(_NUMBER)}}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


_REFUSALS = {
    "the template refuses": re.compile(r"^the chat template refuses it|renders no conversation"),
    "not written": re.compile(r"^the chat template does not write"),
    "rewritten": re.compile(r"as .* but as .* once message|opens the turn of message"),
    "melts": re.compile(r"one row cannot have both"),
}


def outcome_of(sample: Sample) -> str:
    """Return what became of a row, in a word."""
    if sample.refusal is None:
        return "marked" if sample.is_marked else "trained"
    return next((name for name, words in _REFUSALS.items() if words.search(sample.refusal)), "refused")
