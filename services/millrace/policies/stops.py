"""The tokens that end a turn of a policy: what engines stop at, and what a fine-tuning trains after an answer.

A tokenizer's `eos_token` alone is not that set. The chat template of a base checkpoint ends turns with another token
than the tokenizer's, some templates end them with the token that opens the next role's turn, and a model's generation
config may name several. The template's part is found by rendering small conversations.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.decoding import decode_object
from millrace.models.vocabulary import TEMPLATE_ERRORS

GENERATION_CONFIG = "generation_config.json"
_CONFIGS = ("config.json", GENERATION_CONFIG)
# Words that no template writes by itself, and that `trim`, JSON and XML leave as they are.
_ASKED, _SAID, _ASKED_MORE, _ARGUMENT, _RESULT = "qzaskq", "qzsaidq", "qzmoreq", "qzargq", "qzresultq"
_CALL_ID = "qzcall000"  # Mistral's templates take nine letters or digits


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStops:
    """Tokens that end an assistant's turn.

    `token_ids` are all of them. `answer` and `call` are the ones that a policy samples after an answer and after tool
    calls under its chat template; None where the template shows none, or there is no template.
    """

    token_ids: frozenset[int]
    answer: int | None = None
    call: int | None = None


def turn_stops(tokenizer: Any, directory: Path | None = None) -> TurnStops:
    """Return the tokens that end a turn under a tokenizer with its chat template, and by the configs in `directory`.

    `directory` is the model's; None: there are no configs. Raises CorruptObjectError (MODEL_CORRUPT) if a config cannot
    be read.
    """
    answer, call = _template_stops(tokenizer) if getattr(tokenizer, "chat_template", None) else (None, None)
    found = [*configured_stops(directory)] if directory is not None else []
    known = (getattr(tokenizer, "eos_token_id", None), answer, call)
    return TurnStops(
        token_ids=frozenset([*found, *(token for token in known if token is not None)]), answer=answer, call=call
    )


def configured_stops(directory: Path) -> tuple[int, ...]:
    """Return the tokens that a model's `config.json` and `generation_config.json` say to stop at, in their order.

    Raises CorruptObjectError (MODEL_CORRUPT) if one cannot be read.
    """
    found: list[int] = []
    for name in _CONFIGS:
        if (path := directory / name).is_file():
            document = decode_object(
                path.read_bytes(),
                what=str(path),
                reason="MODEL_CORRUPT",
                remedy="copy or download the model again",
                allows_infinity=True,
            )
            inner = document.get("text_config")
            found += _named(document) + (_named(inner) if isinstance(inner, dict) else [])
    return tuple(dict.fromkeys(found))


def with_stops(files: Mapping[str, bytes], stops: Iterable[int]) -> dict[str, bytes]:
    """Return a model's small files, by name, with a generation config that says to stop at exactly the tokens `stops`.

    The files are returned unchanged if a config in them says so already, or `stops` is empty.
    """
    wanted = sorted(set(stops))
    source = next((name for name in (GENERATION_CONFIG, "config.json") if name in files), None)
    config = {} if source is None else _decoded(files[source], source)
    if not wanted or set(_named(config)) == set(wanted):
        return dict(files)
    config = config if source == GENERATION_CONFIG else {}
    config["eos_token_id"] = wanted if len(wanted) > 1 else wanted[0]
    return {**files, GENERATION_CONFIG: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}


def _decoded(data: bytes, what: str) -> dict[str, Any]:
    return decode_object(data, what=what, reason="MODEL_CORRUPT", allows_infinity=True)


def _named(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens in a config's `eos_token_id`; empty if it has none."""
    value = config.get("eos_token_id")
    # -1 is what some old configs have for none.
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int and each >= 0]


def _template_stops(tokenizer: Any) -> tuple[int | None, int | None]:
    """Return the tokens with which the chat template ends an answer, and tool calls; None where it shows none."""
    asked = {"role": "user", "content": _ASKED}
    said, result = {"role": "assistant", "content": _SAID}, {"role": "tool", "content": _RESULT, "name": _ASKED}
    more = {"role": "user", "content": _ASKED_MORE}
    answer = _stop(tokenizer, [asked, said], more, special=special_tokens(tokenizer), after=_SAID, before=_ASKED_MORE)
    # Some tokenizers have the token that ends a turn among their added tokens without marking it as special.
    if answer is None:
        answer = _stop(tokenizer, [asked, said], more, special=_added(tokenizer), after=_SAID, before=_ASKED_MORE)
    special = special_tokens(tokenizer) | ({answer} if answer is not None else set())
    result |= {"tool_call_id": _CALL_ID}
    for arguments in ({_ASKED: _ARGUMENT}, json.dumps({_ASKED: _ARGUMENT})):
        call = {"type": "function", "id": _CALL_ID, "function": {"name": _ASKED, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        twice = _text(tokenizer, [asked, {**turn, "tool_calls": [call, call]}]) or ""
        known = special.difference(_tokens(tokenizer, twice[twice.find(_ARGUMENT) : twice.rfind(_ARGUMENT)]))
        stop = _stop(tokenizer, [asked, turn], result, special=known, after=_ARGUMENT, before=_RESULT)
        if stop is not None:
            return answer, stop
    return answer, None


def _stop(
    tokenizer: Any, turns: list[dict[str, Any]], following: Any, *, special: set[int], after: str, before: str
) -> int | None:
    """Return the token of `special` that ends the last of `turns`, also if the message `following` comes next.

    None if there is none. `after` is the last turn's text, `before` that of the next message. The token is the last one
    after the turn's text of those that are there either way. A template that writes none there either ends the
    conversation otherwise than a turn, or leaves it to the token that opens the next role's turn.
    """
    alone, followed = _text(tokenizer, turns), _text(tokenizer, [*turns, following])
    if alone is None or after not in alone:
        return None
    end = _tokens(tokenizer, alone[alone.rfind(after) + len(after) :])
    if followed is None or before not in followed:
        return next((token for token in end if token in special), None)
    between = followed[: followed.rfind(before)]
    opening = _tokens(tokenizer, between[between.rfind(after) + len(after) :])
    shared = [token for token in end[: common_prefix(end, opening)] if token in special]
    # Only what both have in common counts, because some templates open the next turn without being asked to.
    if shared:
        return tokenizer.eos_token_id if tokenizer.eos_token_id in shared else shared[-1]
    if ending := [token for token in end if token in special]:
        return ending[0]
    # A token that opens every turn says nothing of the next role's, and is no end of this one.
    every = _openers(tokenizer, turns[:-1]) | {tokenizer.bos_token_id}
    return next((token for token in opening if token in special and token not in every), None)


def _openers(tokenizer: Any, turns: list[dict[str, Any]]) -> set[int]:
    """Return the tokens with which the template opens the assistant's turn after `turns`."""
    closed, opened = _text(tokenizer, turns), _text(tokenizer, turns, opens_turn=True)
    if closed is None or opened is None:
        return set()
    return set(_tokens(tokenizer, opened[common_prefix(closed, opened) :]))


def _text(tokenizer: Any, messages: list[dict[str, Any]], *, opens_turn: bool = False) -> str | None:
    """Return the rendering of a conversation; None if the template refuses it, or drops its text.

    `opens_turn` adds the beginning of the assistant's turn. Templates of models that see images take text as a list of
    parts only, and drop it otherwise: both forms are tried.
    """
    for given in (messages, [_in_parts(message) for message in messages]):
        try:
            text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=opens_turn)
        except TEMPLATE_ERRORS:
            continue
        if isinstance(text, str) and messages[0]["content"] in text:
            return text
    return None


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list with one part of text."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens added at its ends."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def special_tokens(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that are not text: those that the tokenizer marks as special."""
    # Both, because `all_special_ids` of transformers 5.23 lacks what only `tokenizer.json` calls special
    # (findings/transformers_special_tokens_twice.sh).
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token for token, content in added.items() if content.special} | set(tokenizer.all_special_ids)


def _added(tokenizer: Any) -> set[int]:
    """Return the ids of all tokens that were added to the tokenizer, special or not."""
    return set(getattr(tokenizer, "added_tokens_decoder", {}))


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the number of leading elements that are equal."""
    if left == right[: len(left)]:
        return len(left)
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
